"""Faster computations of the same functions; `Method.fast = False` disables all of them, and tests compare both."""
