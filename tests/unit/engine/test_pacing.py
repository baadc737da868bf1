"""Heavy work lasts, light work does not."""

import pytest

from comfyfleet.engine.pacing import SECONDS_MAX, lasting


@pytest.mark.parametrize(
    ("operations", "slept"),
    [(0, []), (6e9, [pytest.approx(0.6)]), (1e15, [pytest.approx(SECONDS_MAX - 0.4)])],
)
def test_the_rest_of_the_time_is_slept_away(operations: float, slept: list[float]) -> None:
    times = iter([10.0, 10.4])
    sleeps: list[float] = []
    with lasting(operations, clock=lambda: next(times), sleep=sleeps.append):
        pass
    assert sleeps == slept
