"""Methods that train updates of a frozen network."""
