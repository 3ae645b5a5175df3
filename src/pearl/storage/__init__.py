"""Files of a run, written atomically, and their paths."""
