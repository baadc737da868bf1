"""Heavy work lasts, light work does not."""

import pytest

from comfyfleet.engine.nodes import registry
from comfyfleet.engine.nodes.diagnostics import HEAVY, SECONDS_MAX, minimum_duration, with_cpu_pace


@pytest.mark.parametrize(
    ("operations", "slept"),
    [(0, []), (6e9, [pytest.approx(0.6)]), (1e15, [pytest.approx(SECONDS_MAX - 0.4)])],
)
def test_the_rest_of_the_time_is_slept_away(operations: float, slept: list[float]) -> None:
    times = iter([10.0, 10.4])
    sleeps: list[float] = []
    with minimum_duration(operations, clock=lambda: next(times), sleep=sleeps.append):
        pass
    assert sleeps == slept


def test_only_the_blur_of_a_stand_in_is_paced() -> None:
    nodes = registry()
    changed = [name for name, kind in with_cpu_pace(nodes).items() if kind is not nodes[name]]
    assert changed == [HEAVY]
    assert with_cpu_pace(nodes)[HEAVY].info == nodes[HEAVY].info
