"""Backbones, the targets in them that a task adapts, low-rank deltas, rank rules, growing containers."""
