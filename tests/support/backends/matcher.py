"""Compares a response with a recorded one, except for placeholders."""

import json
import re
from typing import Any

PLACEHOLDER = re.compile(r"<(-?\(?[a-z_]+(?:[:+]\d+\)?)?)>")
# Python sets on ComfyUI's side: no order.
UNORDERED = ("executed", "current_outputs", "dependent_outputs")
BOUND = ("prompt_id", "sid", "random")

Bindings = dict[str, Any]


def match(want: Any, got: Any, bound: Bindings, where: str = "") -> list[str]:
    """The differences, each with its place; empty when they match."""
    if isinstance(want, dict):
        return _match_dict(want, got, bound, where)
    if isinstance(want, list):
        return _match_list(want, got, bound, where)
    if isinstance(want, str) and PLACEHOLDER.search(want):
        return _match_text(want, got, bound, where)
    same = want == got and isinstance(want, bool) == isinstance(got, bool)
    return [] if same else [f"{where}: {_short(want)} was recorded, not {_short(got)}"]


def fill(value: Any, bound: Bindings) -> Any:
    """The value with placeholders replaced by what they stand for."""
    if isinstance(value, dict):
        return {fill(key, bound): fill(item, bound) for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, bound) for item in value]
    if isinstance(value, str):
        return PLACEHOLDER.sub(lambda found: str(bound.get(found[1], found[0])), value)
    return value


def normalise(value: Any) -> Any:
    """Sorts lists for which ComfyUI has no defined order."""
    if isinstance(value, list):
        items = [normalise(item) for item in value]
        return _normalise_row(items) if _is_row(items) else items
    if not isinstance(value, dict):
        return value
    normal = {key: normalise(item) for key, item in value.items()}
    for key in UNORDERED:
        if isinstance(normal.get(key), list):
            normal[key] = sorted(normal[key])
    if isinstance(normal.get("errors"), list):
        normal["errors"] = sorted(
            normal["errors"], key=lambda error: json.dumps(error, sort_keys=True)
        )
    if normal.get("type") == "prompt_outputs_failed_validation":
        normal["details"] = "\n".join(sorted(normal["details"].split("\n")))
    return normal


def _is_row(items: list[Any]) -> bool:
    kinds = [int | float | str, str, dict, dict, list]
    return len(items) == 5 and all(map(isinstance, items, kinds))


def _normalise_row(row: list[Any]) -> list[Any]:
    return [*row[:4], sorted(row[4])]


def _match_dict(want: dict[str, Any], got: Any, bound: Bindings, where: str) -> list[str]:
    want = {fill(key, bound): value for key, value in want.items()}
    if not isinstance(got, dict) or want.keys() != got.keys():
        return [f"{where}: {_short(want)} was recorded, not {_short(got)}"]
    if isinstance(want.get("traceback"), list):
        want = {**want, "traceback": got["traceback"] if _are_texts(got["traceback"]) else []}
    return [
        found
        for key, item in want.items()
        for found in match(item, got[key], bound, f"{where}.{key}")
    ]


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _match_list(want: list[Any], got: Any, bound: Bindings, where: str) -> list[str]:
    if not isinstance(got, list) or len(want) != len(got):
        return [f"{where}: {_short(want)} was recorded, not {_short(got)}"]
    pairs = enumerate(zip(want, got, strict=True))
    return [f for i, (a, b) in pairs for f in match(a, b, bound, f"{where}[{i}]")]


def _match_text(want: str, got: Any, bound: Bindings, where: str) -> list[str]:
    whole = PLACEHOLDER.fullmatch(want)
    if whole and not isinstance(got, str):
        fits = _match_figure(whole[1], got, bound)
    else:
        fits = isinstance(got, str) and _match_parts(want, got, bound)
    return [] if fits else [f"{where}: {_short(fill(want, bound))} was recorded, not {_short(got)}"]


def _match_figure(name: str, got: Any, bound: Bindings) -> bool:
    if isinstance(got, bool) or not isinstance(got, int | float):
        return name in ("tensor", "version") and got is None
    if "number" not in name:
        return name in ("timestamp", "bytes", "line")
    ahead = int(name.rstrip(")").split("+")[1])
    base = -got - ahead if name.startswith("-") else got - ahead
    return bool(bound.setdefault("number", base) == base)


def _match_parts(want: str, got: str, bound: Bindings) -> bool:
    names: list[str] = PLACEHOLDER.findall(want)
    literals = PLACEHOLDER.split(want)[::2]
    pattern = re.escape(literals[0])
    for literal in literals[1:]:
        pattern += f"(.*?){re.escape(literal)}"
    found = re.fullmatch(pattern, got, re.DOTALL)
    if found is None:
        return False
    return all(_bind(name, part, bound) for name, part in zip(names, found.groups(), strict=True))


def _bind(name: str, part: str, bound: Bindings) -> bool:
    if name.split(":")[0] not in BOUND:
        return True
    return bool(bound.setdefault(name, part) == part)


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 300 else f"{text[:300]}…"
