"""A directory that learns, and is asked: runs, models, and the contract of a method."""
