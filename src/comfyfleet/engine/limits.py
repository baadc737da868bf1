"""How much one prompt may take of the machine. Set once, by the process that the engine runs in."""

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from comfyfleet.kernel.errors import InvalidInput, LimitExceeded
from comfyfleet.kernel.pictures import PIXELS_MAX, Size, require_pixels

log = logging.getLogger(__name__)

MEMORY, PIXELS = "COMFYFLEET_ENGINE_MEMORY_BYTES", "COMFYFLEET_MAX_PICTURE_PIXELS"
MEMORY_BYTES_MAX = 8 * 1024**3
MEMORY_BYTES_MIN = 256 * 1024**2
# A node reads one array and makes another, often with one between them; each value has 4 bytes.
BYTES_PER_VALUE = 4 * 4
# Of a picture that is loaded, blurred and saved, all copies together: 105 were measured.
BYTES_PER_PIXEL = 160


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """`memory_bytes`: of the whole process, beyond what it takes when idle."""

    memory_bytes: int = MEMORY_BYTES_MAX
    pixels_max: int = PIXELS_MAX

    @property
    def values_max(self) -> int:
        return self.memory_bytes // BYTES_PER_VALUE


_limits = EngineLimits()


def limits_of(environ: Mapping[str, str]) -> EngineLimits:
    """As set; else half of the machine's memory, and 8 GiB at most. A picture has as many pixels as
    that holds: a larger one is refused with its size, where it would end for want of memory."""
    usual = max(MEMORY_BYTES_MIN, min(MEMORY_BYTES_MAX, _physical_bytes() // 2))
    memory = _number(environ, MEMORY, usual, least=MEMORY_BYTES_MIN)
    most = min(PIXELS_MAX, memory // BYTES_PER_PIXEL)
    return EngineLimits(memory, _number(environ, PIXELS, most, least=1))


def use_limits(limits: EngineLimits) -> None:
    global _limits
    _limits = limits


def limit_memory(limits: EngineLimits) -> None:
    """Of this process, where the system can: what wants more fails, and nothing else does.

    After everything was imported: what is there by then is not counted.
    """
    use_limits(limits)
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = _data_bytes() + limits.memory_bytes
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    except (ImportError, OSError, ValueError):
        log.warning("the memory of the engine can't be limited on this system")


def _data_bytes() -> int:
    """What the process has of its own, heap and stacks; Linux counts the limit by that."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * os.sysconf("SC_PAGE_SIZE")


def require_room(*shape: int) -> None:
    """Refuse an array that is too large, before it is made."""
    if math.prod(shape) > _limits.values_max:
        raise LimitExceeded(f"{'x'.join(map(str, shape))} values are more than this machine holds")


def require_small(size: Size | None) -> None:
    """Refuse a picture that has too many pixels, before it is decoded."""
    require_pixels(size, _limits.pixels_max)


def _physical_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 2 * MEMORY_BYTES_MAX


def _number(environ: Mapping[str, str], name: str, usual: int, *, least: int) -> int:
    text = environ.get(name) or str(usual)
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise InvalidInput(f"{name} is {text!r}; it takes a whole number from {least:,}")
    return int(text)
