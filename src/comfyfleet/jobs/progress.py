"""How far running jobs are, as their workers last said. Told often, so never written down."""

from collections import OrderedDict
from uuid import UUID

from comfyfleet.wire.messages import Progress

KEPT_MAX = 10_000


class Progresses:
    """The newest of each lease, in this process; another control plane may know a newer one."""

    def __init__(self) -> None:
        self._kept: OrderedDict[UUID, Progress] = OrderedDict()

    def note(self, token: UUID, progress: Progress) -> None:
        self._kept[token] = progress
        self._kept.move_to_end(token)
        if len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)

    def of(self, token: UUID | None) -> Progress | None:
        return self._kept.get(token) if token else None
