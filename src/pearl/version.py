"""The version number."""

import time

__version__ = "0.1.0"
LOADED = time.time()  # this process does not run source files that are newer
