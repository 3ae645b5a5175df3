"""Methods that put trained updates into a network that stays as it came."""
