"""Which files each model set stands for, as far as this process has seen."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

from comfyfleet.dispatch.model import Candidate, Waiter
from comfyfleet.fleets.offers import ModelUse, Offer

MODEL_SETS_KEPT_MAX = 10_000
UNKNOWN_READ_MAX = 100

# The models of a dispatch's prompt; None where nobody can tell any more.
FindModels = Callable[[int], Awaitable[Iterable[ModelUse] | None]]


class ModelSets:
    """Noted when a job is enqueued here; of jobs from elsewhere they are read once."""

    def __init__(self) -> None:
        self.find: FindModels | None = None
        self._kept: OrderedDict[str, frozenset[ModelUse]] = OrderedDict()

    def __contains__(self, model_set: str) -> bool:
        return model_set in self._kept

    def note(self, model_set: str, models: Iterable[ModelUse]) -> None:
        self._kept[model_set] = frozenset(models)
        if len(self._kept) > MODEL_SETS_KEPT_MAX:
            self._kept.popitem(last=False)

    def may_run(self, waiter: Waiter, model_set: str | None) -> bool:
        """As far as is known: what isn't is found out when a job of it is given."""
        if waiter.offer is None or model_set is None or model_set not in self._kept:
            return True
        return not self._lacks(waiter.offer, model_set)

    def judge(
        self, waiters: Sequence[Waiter], candidates: Iterable[Candidate]
    ) -> tuple[list[Waiter], dict[str, int]]:
        """The waiters with what they lack, and a dispatch of each model set that isn't known.

        What isn't known is given to nobody whose backend has told what it has.
        """
        named = {each.model_set: each.id for each in candidates if each.model_set}
        offers = {each.offer.key: each.offer for each in waiters if each.offer}
        if not named or not offers:
            return list(waiters), {}
        unknown = {name: where for name, where in named.items() if name not in self._kept}
        lacking = {
            key: frozenset(name for name in named if name in unknown or self._lacks(offer, name))
            for key, offer in offers.items()
        }
        if not any(lacking.values()):
            return list(waiters), {}
        judged = [
            replace(each, lacking=lacking[each.offer.key]) if each.offer else each
            for each in waiters
        ]
        return judged, unknown

    async def read(self, unknown: dict[str, int]) -> None:
        for model_set, dispatch_id in list(unknown.items())[:UNKNOWN_READ_MAX]:
            found = None if self.find is None else await self.find(dispatch_id)
            self.note(model_set, found or ())

    def _lacks(self, offer: Offer, model_set: str) -> bool:
        return bool(offer.lacks((), self._kept[model_set]))
