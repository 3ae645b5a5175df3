"""Checked user settings: configurations, recipes, and the parts that they select. Does not import torch."""
