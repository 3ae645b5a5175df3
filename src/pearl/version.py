"""The version, in one place."""

import time

__version__ = "0.1.0"
LOADED = time.time()  # source that is newer is not what this process runs
