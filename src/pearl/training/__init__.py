"""One loop that trains all phases, on one device or on many."""
