"""Option: work that is heavy for a ComfyUI without a GPU takes as long here.

Clients try out queueing, interrupting and reconnecting while a large blur runs, and count on
seconds. Our way of computing it is faster, so the rest of the time is slept away: in an engine that
stands in for a ComfyUI, never where somebody waits for a picture.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from comfyfleet.engine.node import Context, NodeType, Result

# What a ComfyUI on two cores does, roughly, and the longest that we make anybody wait.
OPERATIONS_PER_SECOND = 6e9
SECONDS_MAX = 2.0


HEAVY = "ImageBlur"


def paced(nodes: Mapping[str, NodeType]) -> dict[str, NodeType]:
    """The same node types, with a blur that takes a ComfyUI's time."""
    blur = nodes[HEAVY]

    def run(context: Context, *, image: Any, blur_radius: int, sigma: float) -> Result:
        # ComfyUI sums over the whole square for each value.
        side = 2 * blur_radius + 1 if blur_radius else 0
        with lasting(image.size * side**2):
            return blur.run(context, image=image, blur_radius=blur_radius, sigma=sigma)

    return {**nodes, HEAVY: replace(blur, run=run)}


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
