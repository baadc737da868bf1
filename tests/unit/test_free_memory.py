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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's malloc")
def test_memory_between_blocks_in_use_is_given_back() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
    )
    assert int(run.stdout) > 35 * MEGABYTE
