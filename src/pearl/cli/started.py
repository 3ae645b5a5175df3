"""The time at which the command line began to load, for `pearl predict --verbose`."""

import time

STARTED = time.perf_counter()
