"""What we are willing to read of a file that anyone may have made."""

from collections.abc import Iterator
from dataclasses import dataclass

from comfyfleet.kernel.errors import LimitExceeded

# Workflows with pasted images reach a few MiB; the editor itself reads 64 MiB of a video.
METADATA_BYTES_MAX = 64 * 1024 * 1024
# libpng writes 8 KiB chunks, so this is a PNG of 1.6 GB; walking them takes well under a second.
CHUNKS_MAX = 200_000
TEXTS_MAX = 10_000
# Far below Python's recursion limit, so that whoever walks the result may recurse too.
JSON_DEPTH_MAX = 200
# A text of "[],[],…" takes twenty times its size in memory: the size alone is no protection. Counted are the
# brackets and commas; the node definitions of a server with many custom nodes have 200,000.
JSON_VALUES_MAX = 2_000_000


@dataclass(frozen=True, slots=True)
class Limits:
    metadata_bytes: int = METADATA_BYTES_MAX
    chunks: int = CHUNKS_MAX
    texts: int = TEXTS_MAX
    json_depth: int = JSON_DEPTH_MAX
    json_values: int = JSON_VALUES_MAX


DEFAULT_LIMITS = Limits()


class Budget:
    """Steps left for one file, shared by all loops: nested loops must not multiply their limits."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._steps_left = limits.chunks

    def step(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise LimitExceeded(
                f"The file has more than {self.limits.chunks:,} parts, more than we look through.",
                limit=self.limits.chunks,
            )

    def steps(self) -> Iterator[None]:
        while True:
            self.step()
            yield
