"""Large JSON columns are converted one at a time: the event loop turns between them."""

import asyncio
import json
from typing import Any

from comfyfleet.server.db.driver import PIECE_CHARACTERS_MAX, _Compiled

LARGE, SMALL = "x" * PIECE_CHARACTERS_MAX, "x"


def compiled(order: list[str]) -> _Compiled:
    def noted(convert: Any) -> Any:
        def run(value: Any) -> Any:
            order.append("convert")
            return convert(value)

        return run

    return _Compiled(
        text="",
        names=["a", "b"],
        constants={},
        binds=[("a", noted(json.dumps)), ("b", noted(json.dumps))],
        columns=["a", "b"],
        reads=[(0, noted(json.loads)), (1, noted(json.loads))],
    )


async def converted(value: str) -> tuple[list[str], list[str]]:
    """Returns the order of conversions and turns of the loop, for values that are bound and for values that are read."""
    orders: list[list[str]] = []
    for is_read in (False, True):
        order: list[str] = []
        statement, loop = compiled(order), asyncio.get_running_loop()
        loop.call_soon(order.append, "turn")
        if is_read:
            rows = await statement.read([[json.dumps(value), json.dumps(value)]])
            assert rows == [[value, value]]
        else:
            assert await statement.bound({"a": value, "b": value}) == [json.dumps(value)] * 2
        orders.append(order)
    return orders[0], orders[1]


async def test_the_loop_turns_between_large_columns() -> None:
    bound, read = await converted(LARGE)
    assert bound == read == ["convert", "turn", "convert"]


async def test_small_columns_are_converted_at_once() -> None:
    bound, read = await converted(SMALL)
    assert bound == read == ["convert", "convert"]
