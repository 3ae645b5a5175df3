"""Continual-learning methods, one file each; `base` holds what they share."""
