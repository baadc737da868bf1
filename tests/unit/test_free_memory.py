"""What a control plane's process keeps of memory that nothing uses."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's malloc")
# After a large block was freed, a smaller one: has it a mapping of its own, to be given back whole?
PROGRAM = """
import ctypes, sys
from comfyfleet.malloc import give_free_memory_back

class Figures(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd".split()]
    _fields_ += [("more", ctypes.c_size_t * 5)]

malloc = ctypes.CDLL(None)
malloc.mallinfo2.restype = Figures
give_free_memory_back(dict(each.split("=") for each in sys.argv[1:]))
large = bytearray(16 * 1024**2)
del large
before = malloc.mallinfo2().hblks
smaller = bytearray(1024**2)
print(malloc.mallinfo2().hblks - before)
"""


def mapped_after(*environ: str) -> int:
    command = [sys.executable, "-c", PROGRAM, *environ]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_large_blocks_are_given_back_whole_whatever_was_freed_before() -> None:
    assert mapped_after() == 1


def test_what_the_environment_says_of_malloc_is_left_as_it_is() -> None:
    assert mapped_after("MALLOC_ARENA_MAX=4") == 0
