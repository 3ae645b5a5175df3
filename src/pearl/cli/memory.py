"""Memory of a process that is pearl's own."""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # of glibc's malloc.h
GIBIBYTE = 2**30


def keep_freed_memory() -> bool:
    """Have glibc keep up to a GiB of freed memory for what is made next; whether it does now.

    By default it gives blocks of more than 32 MiB back to the system, which clears the next ones page by page. Half of
    an evaluation's time can go into that (docs/performance.md). Nothing is done where the environment says how large
    blocks are to be treated, or where there is no glibc.
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
    # older ones refuse such a threshold, but not to have none
    large = mallopt(M_MMAP_THRESHOLD, GIBIBYTE) or mallopt(M_MMAP_MAX, 0)
    return bool(large and mallopt(M_TRIM_THRESHOLD, GIBIBYTE))
