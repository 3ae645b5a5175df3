"""The same functions, computed faster; `Method.fast = False` turns all of them off, and tests compare both."""
