"""Methods that give every task weights of its own in one network, or columns beside it."""
