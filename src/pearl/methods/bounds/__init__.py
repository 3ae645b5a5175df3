"""Reference methods: one network trained in sequence, one per task, and one trained on all data at once."""
