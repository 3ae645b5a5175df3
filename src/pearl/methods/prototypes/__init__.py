"""Methods that classify by statistics of each class's features."""
