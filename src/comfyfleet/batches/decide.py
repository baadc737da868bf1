"""How many held jobs of a batch go to the queue now, and what its jobs come to. Pure."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from comfyfleet.batches.model import ADMITTED_AT_ONCE_MAX, RollUp

ACTIVE = frozenset({"queued", "processing"})


class BatchJob(NamedTuple):
    status: str
    is_held: bool
    reserved_tokens: int


def to_admit(jobs: Iterable[BatchJob], *, at_once: int = ADMITTED_AT_ONCE_MAX) -> int:
    """As many as have ended of those that were admitted, and never more than are held."""
    found = [each for each in jobs if each.status in ACTIVE]
    held = sum(each.is_held for each in found)
    return max(0, min(held, at_once - (len(found) - held)))


def rolled_up(jobs: Iterable[BatchJob]) -> RollUp:
    found = list(jobs)
    held = sum(each.is_held and each.status in ACTIVE for each in found)
    counts = Counter(each.status for each in found if not (each.is_held and each.status in ACTIVE))
    tokens: Counter[str] = Counter()
    for each in found:
        tokens[_money(each.status)] += each.reserved_tokens
    return RollUp(
        total=len(found),
        held=held,
        counts=dict(counts),
        reserved_tokens=tokens["reserved"],
        consumed_tokens=tokens["consumed"],
        refunded_tokens=tokens["refunded"],
    )


def _money(status: str) -> str:
    if status in ACTIVE:
        return "reserved"
    return "consumed" if status == "completed" else "refunded"
