"""Work that is heavy for a ComfyUI without a GPU stays heavy here.

Its clients try out queueing, interrupting and reconnecting while a large blur runs, and count on
seconds. Our way of computing it is faster, so the rest of the time is slept away.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

# What a ComfyUI on two cores does, roughly, and the longest that we make anybody wait.
OPERATIONS_PER_SECOND = 6e9
SECONDS_MAX = 2.0


@contextlib.contextmanager
def lasting(
    operations: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Makes the block last as long as this many operations would.

    Not `context.pause`: an interrupt reaches such a node in ComfyUI only when it has ended.
    """
    end = clock() + min(operations / OPERATIONS_PER_SECOND, SECONDS_MAX)
    yield
    if (left := end - clock()) > 0:
        sleep(left)
