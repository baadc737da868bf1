"""How large a picture may be follows from the memory that the engine has, unless it is set."""

from collections.abc import Iterator

import pytest

from comfyfleet.engine.node import EngineLimits, limits_of, require_small, use_limits
from comfyfleet.errors import LimitExceeded

GIB = 1024**3


@pytest.fixture(autouse=True)
def usual_limits() -> Iterator[None]:
    yield
    use_limits(EngineLimits())


def limits(**environ: str) -> EngineLimits:
    return limits_of({f"COMFYFLEET_{name}": text for name, text in environ.items()})


def test_a_picture_that_would_take_all_memory_is_refused_by_its_size() -> None:
    use_limits(limits(ENGINE_MEMORY_BYTES=str(8 * GIB)))
    require_small((7000, 7000))
    with pytest.raises(LimitExceeded, match="has 8000x8000 pixels; the limit is 53,687,091 pixels"):
        require_small((8000, 8000))


def test_a_smaller_machine_takes_smaller_pictures() -> None:
    assert limits(ENGINE_MEMORY_BYTES=str(GIB)).pixels_max == GIB // 160
    assert limits(ENGINE_MEMORY_BYTES=str(64 * GIB)).pixels_max == 64_000_000


def test_what_is_set_holds() -> None:
    set_so = limits(ENGINE_MEMORY_BYTES=str(GIB), MAX_PICTURE_PIXELS="64000000")
    assert set_so.pixels_max == 64_000_000
