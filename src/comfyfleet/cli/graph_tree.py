"""A graph run as a tree for the terminal. Pure: what the API said in, what is printed out."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text
from rich.tree import Tree

from comfyfleet.cli.world import printable

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
    for node in seen["nodes"]:
        branch = root.add(_node(node))
        for each in running.get(node["id"], ()):
            branch.add(_job(each))
    for line in _remarks(seen):
        root.add(Text(printable(line), style="yellow"))
    return root


def summary(seen: Mapping[str, Any]) -> str:
    progress = seen["progress"]
    counts = f"{progress['completed_nodes']} of {progress['total_nodes']} nodes"
    percent = f"{progress['weighted_percent']:.0f} %"
    name = seen["name"] or seen["id"]  # an expired run has lost its name
    return printable(f"{name}: {seen['status']}, {counts}, {percent}")


def _node(node: Mapping[str, Any]) -> Text:
    mark, style = _MARKS.get(node["status"], ("·", ""))
    what = node["workflow"] or node["type"]
    times = f"  {node['done']}/{node['expected']}" if node["expected"] > 1 else ""
    return Text.assemble(
        (f"{mark} ", style), printable(node["id"]), (f"  {printable(what)}{times}", "dim")
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
