"""A stretch of a file, read by offsets."""

from dataclasses import dataclass
from typing import Literal

from comfyfleet.kernel.errors import InvalidInput, LimitExceeded
from comfyfleet.workflow.media.limits import Limits


class Damaged(InvalidInput):
    """The file contradicts itself or ends too early; what was read before that still counts."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `start` to `end` of a buffer that may be a video of many gigabytes: parts are copied, never the whole.

    All spans share one memoryview instead of slicing it. A slice that lives on in a traceback would keep the
    caller from closing their mmap.
    """

    view: memoryview
    start: int
    end: int

    @classmethod
    def of(cls, data: bytes | memoryview) -> "Span":
        return cls(memoryview(data), 0, len(data))

    def __len__(self) -> int:
        return self.end - self.start

    def cut(self, offset: int, length: int | None = None) -> "Span":
        """The part from `offset` on, all of it or `length` bytes."""
        length = len(self) - offset if length is None else length
        if length < 0 or offset + length > len(self):
            there = max(0, len(self) - offset)
            raise Damaged(
                f"damaged or cut short at byte {self.start + offset:,}, "
                f"where {max(0, length):,} bytes should follow and {there:,} do"
            )
        return Span(self.view, self.start + offset, self.start + offset + length)

    def take(self, offset: int, length: int) -> bytes:
        """A copy of exactly `length` bytes."""
        part = self.cut(offset, length)
        return bytes(part.view[part.start : part.end])

    def peek(self, offset: int, length: int) -> bytes:
        """A copy of up to `length` bytes: fewer, or none, where the span ends."""
        start = min(self.start + offset, self.end)
        return bytes(self.view[start : min(start + length, self.end)])

    def number(self, offset: int, size: int, order: Literal["big", "little"] = "big") -> int:
        return int.from_bytes(self.take(offset, size), order)

    def copy(self, limits: Limits) -> bytes:
        """All of it, if it is of a size that metadata may have."""
        if len(self) > limits.metadata_bytes:
            raise LimitExceeded(
                f"The metadata at byte {self.start:,} has {len(self):,} bytes, "
                f"more than the {limits.metadata_bytes:,} that we read.",
                limit=limits.metadata_bytes,
            )
        return self.take(0, len(self))
