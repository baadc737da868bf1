"""Replays recorded conversations with a real ComfyUI against a server, and reports the differences."""

import base64
import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from tests.golden.shared import SHARED
from tests.support.backends.engine_client import (
    EngineClient,
    EventTimeout,
    SocketClient,
    open_engine_client,
    picture,
)
from tests.support.backends.matcher import PLACEHOLDER, Bindings, fill, match, normalise

from comfyfleet.engine import Served
from comfyfleet.engine.node import Context, EngineNodeType, NodeResult
from comfyfleet.engine.nodes import registry

# Recorded waits let a real ComfyUI blur a large picture; ours only sleeps, and shorter.
TIME_SCALE = 0.3


# What the recorded server needed seconds for; long enough for all that is asked meanwhile.
BLUR_SECONDS = 1.5 * TIME_SCALE
TRANSCRIPTS = SHARED / "transcripts" / "0.28.0.jsonl"


def scenarios() -> list[dict[str, Any]]:
    lines = TRANSCRIPTS.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def nodes_with_slow_blur(seconds: float = BLUR_SECONDS) -> Mapping[str, EngineNodeType]:
    nodes = dict(registry())

    def blur(context: Context, image: Any, blur_radius: int, sigma: float) -> NodeResult:
        # Asleep, not paused: no interrupt reaches a real blur before its end.
        time.sleep(seconds)
        return NodeResult((image,))

    nodes["ImageBlur"] = EngineNodeType(name="ImageBlur", info=nodes["ImageBlur"].info, run=blur)
    return nodes


@dataclass
class Differences:
    """The differences by level. The first levels are the most important ones."""

    status: list[str] = field(default_factory=list)
    bodies: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.status or self.bodies or self.events)


def report(found: Mapping[str, Differences]) -> str:
    lines = []
    for level in ("status", "bodies", "events"):
        missed = {
            name: getattr(diff, level) for name, diff in found.items() if getattr(diff, level)
        }
        lines.append(f"{level}: {len(found) - len(missed)}/{len(found)} scenarios alike")
        lines += [f"  {name}: {places[0]}" for name, places in missed.items()]
    return "\n".join(lines)


def replay(scenario: Mapping[str, Any], served: Served) -> Differences:
    """On an engine, brought to the start first."""
    with open_engine_client(served.url) as talk:
        bring_to_start(talk, served)
        return play(
            scenario, talk, lambda name: (served.engine.data.root / name).unlink(missing_ok=False)
        )


def play(
    scenario: Mapping[str, Any], talk: EngineClient, delete: Callable[[str], object]
) -> Differences:
    """On any server at its start; `delete` takes a file away behind its back."""
    player = _Player(scenario, talk, delete)
    for index, step in enumerate(scenario["steps"]):
        player.do(step, f"step {index + 1}")
    player.compare_events()
    return player.differences


def bring_to_start(talk: EngineClient, served: Served) -> None:
    talk.http.post("/queue", json={"clear": True})
    talk.wait_idle()
    talk.http.post("/free", json={"free_memory": True})
    talk.http.post("/history", json={"clear": True})
    folders = served.engine.folders
    for folder in (folders.input, folders.output, folders.temp):
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


class _Player:
    def __init__(
        self, scenario: Mapping[str, Any], talk: EngineClient, delete: Callable[[str], object]
    ) -> None:
        self.differences = Differences()
        self._scenario = scenario
        self._talk = talk
        self._delete = delete
        self._bound: Bindings = {}
        self._ears: dict[str, SocketClient] = {}

    def do(self, step: Mapping[str, Any], where: str) -> None:
        if "request" in step:
            self._exchange(step["request"], step["response"], where)
        elif "ws" in step:
            self._socket_step(step)
        elif "wait" in step:
            self._wait(step["wait"])
        else:
            _, name = step["disk"].split(" ", 1)
            self._delete(fill(name, self._bound))

    def compare_events(self) -> None:
        loose = "kept" in self._scenario.get("loose", "")
        for name, want in self._scenario["events"].items():
            got = [normalise(_without_figures(event)) for event in self._ears[name].events]
            want = [_without_figures(event) for event in want]
            if loose:
                kept = {event[0] for event in want}
                got = [event for event in got if isinstance(event, list) and event[0] in kept]
            self.differences.events += match(want, got, self._bound, f"events of {name}")

    def _exchange(self, request: Mapping[str, Any], want: Mapping[str, Any], where: str) -> None:
        where = f"{where} {request['method']} {request['path']}"
        answer = self._talk.http.send(self._build(request))
        if answer.status_code != want["status"]:
            self.differences.status.append(
                f"{where}: {want['status']} was recorded, not {answer.status_code}"
            )
        elif _error_type(want.get("json")) != _error_type(_json(answer)):
            self.differences.status.append(f"{where}: another error.type: {answer.text[:200]}")
        self.differences.bodies += self._compare_answer(want, answer, where)

    def _build(self, request: Mapping[str, Any]) -> httpx.Request:
        if unbound := PLACEHOLDER.findall(json.dumps(fill(dict(request), self._bound))):
            self._bind_from_events(unbound)
        request = fill(dict(request), self._bound)
        parts: dict[str, Any] = {"headers": request.get("headers", {})}
        if "json" in request:
            parts["json"] = request["json"]
        elif "text" in request:
            parts["content"] = request["text"].encode()
        elif "multipart" in request:
            parts["content"], kind = _multipart(request["multipart"])
            parts["headers"] = {**parts["headers"], "content-type": kind}
        return self._talk.http.build_request(
            request["method"], request["path"], params=request.get("query"), **parts
        )

    def _bind_from_events(self, unbound: list[str]) -> None:
        """Some names, such as those of temporary files, first appear in an event."""
        for name, ear in self._ears.items():
            for want, got in zip(self._scenario["events"][name], ear.events, strict=False):
                match(want, got, self._bound)

    def _compare_answer(
        self, want: Mapping[str, Any], answer: httpx.Response, where: str
    ) -> list[str]:
        headers = {name: answer.headers.get(name) for name in want["headers"]}
        found = match(want["headers"], headers, self._bound, f"{where} headers")
        self._bound["etag"] = answer.headers.get("etag", "")
        self._bound["http_date"] = answer.headers.get("last-modified", "")
        if "json" in want:
            found += match(want["json"], normalise(_json(answer)), self._bound, where)
        elif "summary" in want:
            summary = SUMMARIES[want["summary_form"]](_json(answer))
            found += match(want["summary"], summary, self._bound, where)
        elif "sha256" in want:
            found += _compare_bytes(want, answer.content, where)
        elif want["text"] != "<html>":
            found += match(want["text"], answer.text, self._bound, where)
        return found

    def _socket_step(self, step: Mapping[str, Any]) -> None:
        name = step["socket"]
        if step["ws"] == "open":
            self._ears[name] = self._talk.listen(step.get("client_id"), step.get("path", "/ws"))
        elif step["ws"] == "send":
            self._ears[name].send(fill(step["data"], self._bound))
        else:
            self._ears[name].close()

    def _wait(self, wait: Any) -> None:
        if wait == "idle":
            self._talk.wait_idle()
        elif "seconds" in wait:
            time.sleep(wait["seconds"] * TIME_SCALE)
        else:
            data = fill(wait.get("data", {}), self._bound)
            try:
                self._ears[wait["socket"]].wait(wait["type"], data)
            except EventTimeout as missing:
                self.differences.events.append(str(missing))


def _without_figures(event: Any) -> Any:
    """Lengths and hashes of pictures depend on the encoder."""
    if not isinstance(event, dict) or "image" not in event:
        return event
    picture = {key: event["image"][key] for key in ("format", "size", "mode")}
    return {**{k: v for k, v in event.items() if k != "length"}, "image": picture}


def _compare_bytes(want: Mapping[str, Any], content: bytes, where: str) -> list[str]:
    if hashlib.sha256(content).hexdigest() == want["sha256"]:
        return []
    if "image" not in want:
        return [f"{where}: other bytes ({len(content)}, {want['bytes']} were recorded)"]
    # A picture that the server has encoded: its bytes depend on the encoder's version.
    return match(want["image"], picture(content), {}, where)


def _multipart(parts: list[Mapping[str, Any]]) -> tuple[bytes, str]:
    """Written by hand: file names are sent unescaped, which no client library does."""
    boundary = "----comfyfleet"
    body = b""
    for part in parts:
        head = f'content-disposition: form-data; name="{part["name"]}"'
        content = str(part.get("value", "")).encode()
        if "base64" in part:
            head += f'; filename="{part["filename"]}"\r\ncontent-type: {part["content_type"]}'
            content = base64.b64decode(part["base64"])
        body += f"--{boundary}\r\n{head}\r\n\r\n".encode() + content + b"\r\n"
    return body + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def _json(answer: httpx.Response) -> Any:
    with contextlib.suppress(ValueError):
        return answer.json()
    return None


def _error_type(body: Any) -> Any:
    error = body.get("error") if isinstance(body, dict) else None
    return error.get("type") if isinstance(error, dict) else None


def _ids(rows: list[Any]) -> list[str]:
    return [row[1] for row in rows]


def _inputs_outputs_status(history: Mapping[str, Any]) -> list[Any]:
    return [
        {
            "inputs": {key: node["inputs"] for key, node in entry["prompt"][2].items()},
            "outputs": entry["outputs"],
            "status": entry["status"]["status_str"],
        }
        for entry in history.values()
    ]


def _job_ids(body: Mapping[str, Any]) -> list[str]:
    return [job["id"] for job in body["jobs"]]


def _job_states(body: Mapping[str, Any]) -> list[list[str]]:
    return [[job["id"], job["status"]] for job in body["jobs"]]


def _some_classes(body: Mapping[str, Any]) -> dict[str, Any]:
    has = [name for name in ("EmptyImage", "SaveImage", "LoadImage") if name in body]
    return {"type": "object", "has": has, "more_than_500_classes": len(body) > 500}


SUMMARIES: Mapping[str, Any] = {
    "keys": list,
    "sorted_keys": sorted,
    "prompt_ids": lambda body: {key: _ids(rows) for key, rows in body.items()},
    "number_and_prompt_id": lambda body: {
        key: [row[:2] for row in rows] for key, rows in body.items()
    },
    "ids_and_pagination": lambda body: {"ids": _job_ids(body), "pagination": body["pagination"]},
    "id_and_status": _job_states,
    "id_and_status_and_pagination": lambda body: {
        "jobs": _job_states(body),
        "pagination": body["pagination"],
    },
    "inputs_outputs_status": _inputs_outputs_status,
    "status_strs": lambda body: [entry["status"]["status_str"] for entry in body.values()],
    "some_classes": _some_classes,
    "type": lambda body: {"type": type(body).__name__},
    "type_and_count": lambda body: {"type": type(body).__name__, "count": len(body)},
}
