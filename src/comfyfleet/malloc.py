"""What a process keeps of memory that nothing uses any more."""

import sys
from collections.abc import Mapping

# Of mallopt(3): parameters of glibc's malloc.
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
THRESHOLD_BYTES = 128 * 1024
ARENAS = 2


def give_free_memory_back(environ: Mapping[str, str]) -> None:
    """Holds glibc to the thresholds that it begins with.

    By itself it raises them whenever a large block is freed. Larger blocks are then cut from the heap
    between small ones that stay, and a control plane grows by 500 bytes with each job, of which nothing is
    in use. Nothing is changed on other systems, or where the environment says how malloc is to be.
    """
    is_told = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in environ)
    if sys.platform != "linux" or is_told:
        return
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return
    mallopt(MMAP_THRESHOLD, THRESHOLD_BYTES)
    mallopt(TRIM_THRESHOLD, THRESHOLD_BYTES)
    mallopt(ARENA_MAX, ARENAS)
