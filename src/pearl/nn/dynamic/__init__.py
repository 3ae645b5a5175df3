"""Rank rules that find ranks by training: updates of a start rank lose components while they train."""
