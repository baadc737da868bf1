"""A graph run as a tree for the terminal. Pure: what the API said in, what is printed out."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.text import Text
from rich.tree import Tree

from comfyfleet.cli.world import printable

FILES_SHOWN_MAX = 8
VALUE_CHARACTERS_MAX = 200
_MARKS = {
    "done": ("✓", "green"),
    "running": ("▶", "blue"),
    "queued": ("○", ""),
    "failed": ("✗", "bold red"),
    "skipped": ("–", "dim"),
    "cancelled": ("■", "dim"),
    "pending": ("·", "dim"),
}


def tree(seen: Mapping[str, Any]) -> Tree:
    root = Tree(Text(summary(seen), style="bold"))
    running: dict[str, list[Mapping[str, Any]]] = {}
    for each in seen["progress"]["running_nodes"]:
        running.setdefault(each["node_id"], []).append(each)
    seconds = _seconds_by_node(seen.get("executions", ()))
    for node in seen["nodes"]:
        branch = root.add(_node(node, seconds.get(node["id"])))
        for each in running.get(node["id"], ()):
            branch.add(_job(each))
    for line in _remarks(seen):
        root.add(Text(printable(line), style="yellow"))
    for name, value in (seen.get("outputs") or {}).items():
        root.add(Text.assemble(("→ ", "green"), printable(f"{name}: {_shown(value)}")))
    return root


def _seconds_by_node(executions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """From the first start to the last end; of nodes that have jobs, and once they have ended."""
    spans: dict[str, list[datetime]] = {}
    for each in executions:
        if each["started_at"] and each["ended_at"]:
            moments = (each["started_at"], each["ended_at"])
            spans.setdefault(each["node"], []).extend(map(datetime.fromisoformat, moments))
    return {node: (max(found) - min(found)).total_seconds() for node, found in spans.items()}


def _shown(value: Any) -> str:
    """Files by their names, texts as they are, everything else as JSON, on one line."""
    files = list({each["file_id"]: each["filename"] for each in _files_in(value)}.values())
    if files:
        more = f" and {len(files) - FILES_SHOWN_MAX} more" if len(files) > FILES_SHOWN_MAX else ""
        return ", ".join(files[:FILES_SHOWN_MAX]) + more
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= VALUE_CHARACTERS_MAX else f"{text[: VALUE_CHARACTERS_MAX - 1]}…"


def _files_in(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        if "file_id" in value and "filename" in value:
            yield value
            return
        value = [value["files"]] if value.get("files") else list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _files_in(part)


def summary(seen: Mapping[str, Any]) -> str:
    progress = seen["progress"]
    counts = f"{progress['completed_nodes']} of {progress['total_nodes']} nodes"
    percent = f"{progress['weighted_percent']:.0f} %"
    name = seen["name"] or seen["id"]  # an expired run has lost its name
    return printable(f"{name}: {seen['status']}, {counts}, {percent}")


def _node(node: Mapping[str, Any], seconds: float | None) -> Text:
    mark, style = _MARKS.get(node["status"], ("·", ""))
    what = node["workflow"] or node.get("effect") or node["type"]
    times = f"  {node['done']}/{node['expected']}" if node["expected"] > 1 else ""
    took = f"  {seconds:.1f} s" if seconds is not None else ""
    return Text.assemble(
        (f"{mark} ", style), printable(node["id"]), (f"  {printable(what)}{times}{took}", "dim")
    )


def _job(job: Mapping[str, Any]) -> Text:
    index = "".join(f"[{number}]" for number in job["index"])
    where = job["backend_id"] or "in the queue"
    parts = [index, where, f"{100 * job['progress']:.0f} %", job["current_step"] or ""]
    return Text(printable(" ".join(filter(None, parts))), style="blue")


def _remarks(seen: Mapping[str, Any]) -> Iterator[str]:
    if seen.get("is_expired"):
        yield "its time was up: what went in, came out and was recorded is gone"
    for each in seen["questions"]:
        choices = ", ".join(each["choices"])
        others = f" (backends: {', '.join(each['backends'])})" if each["backends"] else ""
        yield f"{each['node']} asks: {each['message']}; answer {choices}{others}"
    if seen["error"]:
        yield seen["error"]["message"]
        if seen["error"]["alternatives"]:
            yield f"it could run on {', '.join(seen['error']['alternatives'])}"
