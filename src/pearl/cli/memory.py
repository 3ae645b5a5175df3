"""Memory settings of a process that belongs to pearl."""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # of glibc's malloc.h
GIBIBYTE = 2**30


def keep_freed_memory() -> bool:
    """Make glibc keep up to a GiB of freed memory for later allocations; return whether it does.

    By default glibc returns blocks of more than 32 MiB to the system, which clears new ones page by page. That can take
    half of an evaluation's time (docs/performance.md). Nothing changes if the environment sets malloc's thresholds or
    the C library is not glibc.
    """
    env = os.environ
    if {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_"} & env.keys():
        return False
    if "glibc.malloc" in env.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # other systems
        return False
    # older versions refuse this threshold but accept having no mapped blocks
    large = mallopt(M_MMAP_THRESHOLD, GIBIBYTE) or mallopt(M_MMAP_MAX, 0)
    return bool(large and mallopt(M_TRIM_THRESHOLD, GIBIBYTE))
