"""Runs and models as directories that learn and predict, and the contract of a method."""
