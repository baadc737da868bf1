"""Values are measured without writing them as text."""

from typing import Any

import pytest

from comfyfleet.api.sizes import SMALL_BYTES_MAX, SMALL_VALUES_MAX, is_small


@pytest.mark.parametrize(
    "value",
    [
        [0] * SMALL_VALUES_MAX,
        {str(number): [] for number in range(SMALL_VALUES_MAX)},
        [[[number]] for number in range(SMALL_VALUES_MAX // 3 + 1)],
        "x" * (SMALL_BYTES_MAX + 1),
        {"x" * (SMALL_BYTES_MAX + 1): 0},
        {"a": [{"b": ["x" * SMALL_BYTES_MAX, "y"]}]},
    ],
)
def test_a_value_with_many_parts_or_long_texts_is_not_small(value: Any) -> None:
    assert not is_small(value)


@pytest.mark.parametrize(
    "value", [None, 1.5, "x", [], {}, [0] * (SMALL_VALUES_MAX - 1), {"a": [1]}]
)
def test_other_values_are_small(value: Any) -> None:
    assert is_small(value)
