"""Files of a run that are whole or absent, and where they lie."""
