"""Who can run what: workers by what their backends offer, workflows by what they need."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from datetime import datetime
from typing import Generic, TypeVar

from comfyfleet.db import Tx
from comfyfleet.fleets.model import Assigned, Worker
from comfyfleet.fleets.offers import Missing, Needs, Offer, needs_of, offer_of, refusals_in
from comfyfleet.fleets.store import needs as needs_store
from comfyfleet.fleets.store import workers as worker_store

Value = TypeVar("Value")
OFFERS_KEPT_MAX = 1_000
NEEDS_KEPT_MAX = 10_000
VERDICTS_KEPT_MAX = 100_000


class Abilities:
    """Offers and versions never change under their keys, so both are kept at hand."""

    def __init__(self) -> None:
        self._offers: _Kept[Offer] = _Kept(OFFERS_KEPT_MAX)
        self._needs: _Kept[Needs] = _Kept(NEEDS_KEPT_MAX)
        self._lacks: _Kept[Missing] = _Kept(VERDICTS_KEPT_MAX)

    async def offer(self, tx: Tx, worker: Worker, *, now: datetime) -> Offer | None:
        """None if nothing is known of its backend: it is then believed to be able."""
        return (await self.offers(tx, [worker], now=now)).get(worker.worker_id)

    async def offers(self, tx: Tx, workers: Iterable[Worker], *, now: datetime) -> dict[str, Offer]:
        """By worker, of those whose backends have told something."""
        found: dict[str, Offer] = {}
        unread: dict[str, list[Worker]] = {}
        for worker in workers:
            key = _offer_key(worker, now)
            if key and (kept := self._offers.get(key)):
                found[worker.worker_id] = kept
            elif key:
                unread.setdefault(key, []).append(worker)
        firsts = [those[0] for those in unread.values()]
        facts = await worker_store.facts_of(tx, [each.id for each in firsts]) if firsts else {}
        for key, those in unread.items():
            refusals = refusals_in(those[0].refusals, now)
            offer = offer_of(facts.get(those[0].worker_id), refusals, key)
            self._offers.keep(key, offer)
            found |= {each.worker_id: offer for each in those}
        return found

    async def able(
        self, tx: Tx, offer: Offer | None, workflows: Sequence[Assigned]
    ) -> list[Assigned]:
        """The workflows of which a backend lacks nothing."""
        if offer is None:
            return list(workflows)
        await self._read_needs(tx, workflows)
        return [each for each in workflows if not self._missing(offer, each)]

    def _missing(self, offer: Offer, workflow: Assigned) -> Missing:
        key = (offer.key, workflow.workflow_id, workflow.version)
        found = self._lacks.get(key)
        if found is None:
            needs = self._needs.get(key[1:]) or Needs()
            found = self._lacks.keep(key, offer.lacks(needs.node_types, needs.models))
        return found

    async def _read_needs(self, tx: Tx, workflows: Iterable[Assigned]) -> None:
        unread = [
            key
            for each in workflows
            if self._needs.get(key := (each.workflow_id, each.version)) is None
        ]
        if not unread:
            return
        rows = await needs_store.of_versions(tx, unread)
        for key in unread:
            row = rows.get(key)
            self._needs.keep(key, Needs() if row is None else needs_of(*row))


def _offer_key(worker: Worker, now: datetime) -> str | None:
    refusals = refusals_in(worker.refusals, now)
    if not refusals:
        return worker.facts_hash
    told = json.dumps([sorted(refusals.node_types), sorted(refusals.models)])
    return f"{worker.facts_hash} {hashlib.sha256(told.encode()).hexdigest()}"


class _Kept(Generic[Value]):
    """The newest of values that never change under their keys."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable) -> Value | None:
        return self._values.get(key)

    def keep(self, key: Hashable, value: Value) -> Value:
        self._values[key] = value
        if len(self._values) > self._most:
            self._values.popitem(last=False)
        return value
