"""What a control plane's process keeps of memory that nothing uses."""

import platform
import subprocess
import sys

import pytest

MEGABYTE = 1024**2
# The last block stays, so that malloc itself gives nothing of the others back.
PROGRAM = """
import os
from comfyfleet.malloc import give_free_memory_back

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

blocks = [bytearray(b"x") * 100_000 for _ in range(400)]
del blocks[:-1]
before = resident()
give_free_memory_back()
print(before - resident())
"""

# Each thread has memory of its own when the arenas are counted.
THREADS = """
import ctypes, sys
from threading import Barrier, Thread
from comfyfleet.malloc import use_one_arena

use_one_arena()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
all_have_some, counted = Barrier(9), Barrier(9)

def hold():
    kept = [bytearray(10_000) for _ in range(100)]
    all_have_some.wait()
    counted.wait()

for _ in range(8):
    Thread(target=hold).start()
all_have_some.wait()
out = ctypes.c_void_p(libc.fdopen(sys.stdout.fileno(), b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
counted.wait()
"""


def printed_by(program: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return run.stdout


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's malloc")
def test_all_threads_share_free_memory() -> None:
    assert printed_by(THREADS).count("<heap nr=") == 1
    assert printed_by(THREADS.replace("use_one_arena()\nlibc", "libc")).count("<heap nr=") > 1


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's malloc")
def test_memory_between_blocks_in_use_is_given_back() -> None:
    assert int(printed_by(PROGRAM)) > 35 * MEGABYTE
