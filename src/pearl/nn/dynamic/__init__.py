"""Rank rules that find ranks by training: updates start at a given rank and lose components during training."""
