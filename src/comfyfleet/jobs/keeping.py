"""What is asked for again and again, kept at hand."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar

from comfyfleet.effects.prompting import Chance

Value = TypeVar("Value")
DOCUMENTS_KEPT_MAX = 64
PROMPTS_KEPT_MAX = 256
ANSWERS_KEPT_MAX = 10_000
DATE = "%date"


class Documents:
    """The few documents that are asked for again and again; they never change under their key."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Mapping[str, Any]] = OrderedDict()

    async def get(
        self, key: str, read: Callable[[], Awaitable[Mapping[str, Any]]]
    ) -> Mapping[str, Any]:
        if key not in self._kept:
            self._kept[key] = await read()
            if len(self._kept) > DOCUMENTS_KEPT_MAX:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]


class Lately(Generic[Value]):
    """Answers of which nobody minds that they are a moment old."""

    def __init__(self, fresh: timedelta) -> None:
        self._fresh = fresh
        self._kept: dict[Hashable, tuple[datetime, Value]] = {}

    async def get(
        self, key: Hashable, read: Callable[[], Awaitable[Value]], *, now: datetime
    ) -> Value:
        kept = self._kept.get(key)
        if kept is not None and timedelta() <= now - kept[0] < self._fresh:
            return kept[1]
        if len(self._kept) >= ANSWERS_KEPT_MAX:
            self._kept.clear()
        value = await read()
        self._kept[key] = now, value
        return value


class Prompts:
    """A workflow is converted once, unless its prompt differs each time: by its date or its dice."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Mapping[str, Any] | None] = OrderedDict()

    def get(
        self, key: str, convert: Callable[[Chance], Mapping[str, Any]], chance: Chance
    ) -> Mapping[str, Any]:
        """Never change it: it is everybody's."""
        if key not in self._kept:
            self._kept[key] = _unless_it_varies(convert)
            if len(self._kept) > PROMPTS_KEPT_MAX:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        kept = self._kept[key]
        return convert(chance) if kept is None else kept


class _Dice:
    """Tells whether anybody has thrown them."""

    was_thrown = False

    def random(self) -> float:
        self.was_thrown = True
        return 0.0


def _unless_it_varies(convert: Callable[[Chance], Mapping[str, Any]]) -> Mapping[str, Any] | None:
    dice = _Dice()
    # Without a date its patterns stay as they are, and can be seen.
    made = convert(Chance(None, dice))
    return None if dice.was_thrown or DATE in repr(made) else made
