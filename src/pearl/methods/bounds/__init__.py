"""What every method is held against: one network trained on, one for each task, one trained on all data at once."""
