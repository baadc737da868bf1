"""How far running jobs are, as their workers last said. Told often, so never written down."""

from collections import OrderedDict
from uuid import UUID

from comfyfleet.wire.messages import Progress

KEPT_MAX = 10_000
CHARACTERS_MAX = 64 * 1024 * 1024


class Progresses:
    """The newest of each lease: told by its worker here, or heard from another control plane.

    Forgotten when the lease ends here. Of leases that end elsewhere nobody hears, and a picture may come
    with each: beyond `CHARACTERS_MAX` in all, those that were told longest ago go.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[UUID, Progress] = OrderedDict()
        self._characters = 0
        self._heard: OrderedDict[UUID, Progress] = OrderedDict()
        self._missed: set[UUID] = set()
        self._changed: set[UUID] = set()

    def note(self, token: UUID, progress: Progress) -> None:
        self.forget(token)
        self._kept[token] = progress
        self._characters += _characters(progress)
        while len(self._kept) > KEPT_MAX or self._characters > CHARACTERS_MAX:
            _, oldest = self._kept.popitem(last=False)
            self._characters -= _characters(oldest)
        if len(self._changed) < KEPT_MAX:
            self._changed.add(token)

    def forget(self, token: UUID) -> None:
        """The lease has ended, or something newer is told of it."""
        self._heard.pop(token, None)
        self._missed.discard(token)
        self._changed.discard(token)
        if (known := self._kept.pop(token, None)) is not None:
            self._characters -= _characters(known)

    def hear(self, token: UUID, progress: Progress) -> None:
        """From another control plane. If the worker has come over to us, it told us since."""
        if token not in self._kept:
            self._heard[token] = progress
            self._heard.move_to_end(token)
            if len(self._heard) > KEPT_MAX:
                self._heard.popitem(last=False)

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


def _characters(progress: Progress) -> int:
    return len(progress.preview or "") + len(progress.node or "")
