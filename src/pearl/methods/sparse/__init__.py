"""Methods that give every task its own weights in one network, or a column of its own."""
