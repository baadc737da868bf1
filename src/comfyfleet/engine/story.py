"""What is told about a run: to its client as it happens, and to history for later."""

from collections.abc import Callable, Mapping
from typing import Any

from comfyfleet.engine.context import Surroundings

Message = tuple[str, Mapping[str, Any]]


class Story:
    """The messages of one run. Without a client most of them reach history only."""

    def __init__(
        self,
        around: Surroundings,
        clock: Callable[[], float],
        announce: Callable[[Any, str], None],
    ) -> None:
        self.messages: list[Message] = []
        self._around = around
        self._clock = clock
        self._announce = announce

    def tell(self, event: str, *, to_all: bool = False, **data: Any) -> None:
        """Tell the client and history; `to_all` makes up for a missing client."""
        now_ms = int(self._clock() * 1000)
        timed = {**data, "prompt_id": self._around.prompt_id, "timestamp": now_ms}
        self.messages.append((event, timed))
        if self._around.client_id is not None or to_all:
            self._around.audience.send(event, timed, self._around.client_id)

    def executing(self, node_id: str) -> None:
        if self._around.client_id is not None:
            self._announce(self._around.client_id, node_id)
            self._send("executing", node_id)

    def executed(self, node_id: str, output: Mapping[str, Any] | None) -> None:
        if self._around.client_id is not None:
            self._send("executed", node_id, output=output)

    def _send(self, event: str, node_id: str, **more: Any) -> None:
        data = {"node": node_id, "display_node": node_id, **more}
        data["prompt_id"] = self._around.prompt_id
        self._around.audience.send(event, data, self._around.client_id)
