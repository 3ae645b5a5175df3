"""Methods that keep images of past tasks and show them again."""
