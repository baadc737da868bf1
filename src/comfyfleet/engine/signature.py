"""What makes two nodes the same to the cache: their content and that of all before them."""

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from comfyfleet.engine.inputs import is_link
from comfyfleet.engine.node import NodeType
from comfyfleet.engine.validate import Prompt

DIGEST_BYTES = 16


class Signer:
    """Gives each node a signature; what can't be compared gets one that never comes again."""

    def __init__(self, nodes: Mapping[str, NodeType]) -> None:
        self._nodes = nodes
        self._unique = itertools.count()

    def sign(self, prompt: Prompt) -> dict[str, str]:
        """Signatures of all nodes. Walks by hand: a prompt may be deeper than Python's stack."""
        signed: dict[str, str] = {}
        opened: set[str] = set()
        waiting = list(prompt)
        while waiting:
            node_id = waiting[-1]
            before = [
                source
                for source in _sources(prompt[node_id])
                if source in prompt and source not in signed and source not in opened
            ]
            if before and node_id not in signed:
                opened.add(node_id)
                waiting += before
                continue
            waiting.pop()
            if node_id not in signed:
                signed[node_id] = self._digest(node_id, prompt[node_id], signed)
        return signed

    def _digest(self, node_id: str, node: Mapping[str, Any], signed: Mapping[str, str]) -> str:
        kind = self._nodes[node["class_type"]]
        parts = [repr(kind.name)]
        if kind.fingerprint:
            parts.append(self._canonical(node.get("is_changed")))
        if "UNIQUE_ID" in kind.info["input"].get("hidden", {}).values():
            parts.append(repr(node_id))
        for name, value in sorted(node.get("inputs", {}).items()):
            parts.append(f"{name!r}={self._value(value, signed)}")
        text = ";".join(parts).encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, digest_size=DIGEST_BYTES).hexdigest()

    def _value(self, value: Any, signed: Mapping[str, str]) -> str:
        if not is_link(value):
            return self._canonical(value)
        # A source that is missing, or part of a cycle, has no signature.
        source = signed.get(value[0]) or self._never_again()
        return f"<{source}:{self._canonical(value[1])}>"

    def _canonical(self, value: Any) -> str:
        """Equal for values that Python takes for equal: 1, 1.0 and true."""
        match value:
            case str() | None:
                return repr(value)
            case int() | float():
                return self._number(value)
            case list() | tuple():
                return f"[{','.join(map(self._canonical, value))}]"
            case dict():
                entries = (f"{key!r}:{self._canonical(value[key])}" for key in sorted(value))
                return f"{{{','.join(entries)}}}"
        return self._never_again()

    def _number(self, value: float) -> str:
        if math.isnan(value):
            return self._never_again()
        whole = math.isfinite(value) and value == int(value)
        return str(int(value)) if whole else repr(value)

    def _never_again(self) -> str:
        return f"?{next(self._unique)}"


def _sources(node: Mapping[str, Any]) -> Iterator[str]:
    return (value[0] for value in node.get("inputs", {}).values() if is_link(value))
