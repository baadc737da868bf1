"""Counts the Python objects of control planes by type, in their processes, on a signal.

The hook of a chaos run installs the handler (see `hook/sitecustomize.py`); the product has none.
"""

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SIGNAL, FOLDER = signal.SIGUSR2, "CHAOS_TYPES"
COUNT_SECONDS_MAX, LOOK_SECONDS = 60.0, 0.2
SHOWN_MAX = 12
FORK_SECONDS_MAX = 3.0


@dataclass
class Sample:
    """One process: its resident bytes, and (count, bytes) of each type of object."""

    pid: int
    rss: int
    types: dict[str, tuple[int, int]] = field(default_factory=dict)
    # Garbage in reference cycles that no collection has found yet, which `types` includes.
    garbage: dict[str, int] = field(default_factory=dict)
    heap: dict[str, int] = field(default_factory=dict)


def install() -> None:
    if os.environ.get(FOLDER) and hasattr(signal, "SIGUSR2"):
        signal.signal(SIGNAL, lambda *_: _count_soon())


def _count_soon() -> None:
    """Counts in a callback of the running event loop, if there is one.

    A signal can interrupt code that holds a lock that `os.fork` acquires, such as the one of
    `ThreadPoolExecutor.submit`. A fork in the signal handler would then wait forever.
    """
    loop = asyncio._get_running_loop()
    if loop is None:
        _fork_and_count()
    else:
        loop.call_soon_threadsafe(_fork_and_count)


def _fork_and_count() -> None:
    """Counts in a copy of the process, which itself is not delayed and doesn't grow."""
    pid, child = os.getpid(), os.fork()
    if child:
        _wait_for(child)
        return
    try:
        if not os.fork():
            gc.disable()  # finalizers must not run in the copy
            gc.unfreeze()  # objects that are exempted from collections count, too
            _close_files()
            _write_counts(pid)
    finally:
        os._exit(0)


def _wait_for(child: int) -> None:
    """Waits for the first copy, which ends as soon as it has made the second one.

    A copy has none of the other threads, so it hangs if one of them held a lock that it needs.
    """
    until = time.monotonic() + FORK_SECONDS_MAX
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return
        time.sleep(0.001)


def _write_counts(pid: int) -> None:
    path = Path(os.environ[FOLDER], f"types-{pid}.json")
    counted = {"types": _count_types(), "heap": _heap(), "garbage": _count_garbage()}
    path.with_suffix(".new").write_text(json.dumps(counted))
    path.with_suffix(".new").rename(path)


def _close_files() -> None:
    """Closes the copies of the sockets, so that no finalizer in the copy sends anything."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def _count_garbage() -> dict[str, int]:
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    return dict(Counter(map(_name, gc.garbage)))


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _count_types() -> dict[str, tuple[int, int]]:
    """Counts the objects that the garbage collector tracks, and objects they refer to, such as texts."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    tracked = gc.get_objects()
    seen = {id(tracked)}
    for owner in tracked:
        _count(owner, counts, seen)
        for value in gc.get_referents(owner):
            if not gc.is_tracked(value):
                _count(value, counts, seen)
    return {name: (count, size) for name, (count, size) in counts.items()}


def _count(value: object, counts: dict[str, list[int]], seen: set[int]) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    entry = counts[_name(value)]
    entry[0] += 1
    with contextlib.suppress(Exception):
        entry[1] += sys.getsizeof(value)


class _MallInfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def _heap() -> dict[str, int]:
    """The C heap: bytes in use, free bytes that are not returned to the system, and mapped bytes."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return {}
    mallinfo.restype = _MallInfo
    info = mallinfo()
    blocks = sys.getallocatedblocks()
    return {
        "used": info.uordblks,
        "free": info.fordblks,
        "mapped": info.hblkhd,
        "blocks": blocks,
        "collected": gc.get_stats()[2]["collections"],
    }


async def sample(pids: Mapping[str, int], folder: Path) -> dict[str, Sample]:
    """Counts the objects of these processes, one after the other."""
    samples = {}
    for name, pid in pids.items():
        with contextlib.suppress(OSError):
            samples[name] = await _sample(pid, folder)
    return samples


async def _sample(pid: int, folder: Path) -> Sample:
    path = folder / f"types-{pid}.json"
    path.unlink(missing_ok=True)
    size = resident_bytes(pid)
    os.kill(pid, SIGNAL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(COUNT_SECONDS_MAX):
            while not path.exists():  # noqa: ASYNC110
                await asyncio.sleep(LOOK_SECONDS)
    counted = json.loads(path.read_text()) if path.exists() else {}
    return Sample(pid, size, **counted)


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def growth(before: Sample, after: Sample) -> list[str]:
    """The types that grew most in bytes."""
    changes = []
    for name, (count, size) in after.types.items():
        old_count, old_size = before.types.get(name, (0, 0))
        if size > old_size:
            changes.append((size - old_size, count - old_count, name))
    return [
        f"{name}: {count:+,} objects, {size / 1024:+,.0f} KiB"
        for size, count, name in sorted(changes, reverse=True)[:SHOWN_MAX]
    ]
