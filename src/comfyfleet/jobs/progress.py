"""How far running jobs are, as their workers last said. Told often, so never written down."""

from collections import OrderedDict
from uuid import UUID

from comfyfleet.wire.messages import Progress

KEPT_MAX = 10_000


class Progresses:
    """The newest of each lease: told by its worker here, or heard from another control plane."""

    def __init__(self) -> None:
        self._kept: OrderedDict[UUID, Progress] = OrderedDict()
        self._heard: OrderedDict[UUID, Progress] = OrderedDict()
        self._missed: set[UUID] = set()
        self._changed: set[UUID] = set()

    def note(self, token: UUID, progress: Progress) -> None:
        _keep(self._kept, token, progress)
        self._heard.pop(token, None)
        if len(self._changed) < KEPT_MAX:
            self._changed.add(token)

    def hear(self, token: UUID, progress: Progress) -> None:
        """From another control plane. If the worker has come over to us, it told us since."""
        if token not in self._kept:
            _keep(self._heard, token, progress)

    def of(self, token: UUID | None) -> Progress | None:
        if token is None:
            return None
        if (known := self._kept.get(token)) is not None:
            return known
        if len(self._missed) < KEPT_MAX:
            self._missed.add(token)
        return self._heard.get(token)

    def own(self, token: UUID) -> Progress | None:
        """As its worker told this control plane."""
        return self._kept.get(token)

    def take_missed(self) -> set[UUID]:
        """Those that somebody wanted to know here, and whose worker doesn't talk to us."""
        missed, self._missed = self._missed, set()
        return missed

    def take_changed(self) -> set[UUID]:
        changed, self._changed = self._changed, set()
        return changed


def _keep(kept: OrderedDict[UUID, Progress], token: UUID, progress: Progress) -> None:
    kept[token] = progress
    kept.move_to_end(token)
    if len(kept) > KEPT_MAX:
        kept.popitem(last=False)
