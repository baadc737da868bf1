"""The recorded talks with real ComfyUIs, read by the client: of both versions it concludes alike."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from tests.golden.shared import SHARED

from comfyfleet.comfy.answers import refusal_from
from comfyfleet.comfy.events import Cancelled, End, Failed, Succeeded
from comfyfleet.comfy.messages import RunOver, UnknownMessage, parse_message
from comfyfleet.comfy.run_location import InHistory, parse_history
from comfyfleet.comfy.server import find_outputs

TRANSCRIPTS = SHARED / "transcripts"
VERSIONS = ("0.7.0", "0.28.0")
Scenario = Mapping[str, Any]

pytestmark = pytest.mark.skipif(not TRANSCRIPTS.is_dir(), reason="the shared folder is not here")


def scenarios(version: str) -> Iterator[Scenario]:
    with (TRANSCRIPTS / f"{version}.jsonl").open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def heard(scenario: Scenario) -> dict[str, End]:
    """How each run ended, by what its client's socket was told."""
    ends: dict[str, End] = {}
    for events in scenario["events"].values():
        for event in events:
            if isinstance(event, list):
                message = parse_message(json.dumps({"type": event[0], "data": event[1]}))
                if isinstance(message, Succeeded | Failed | Cancelled):
                    ends[message.run_id] = message
    return ends


def kept(scenario: Scenario) -> Iterator[tuple[str, InHistory]]:
    """How each run ended, by history."""
    for step in scenario["steps"]:
        body = step.get("response", {}).get("json")
        path = step.get("request", {}).get("path", "")
        if path.startswith("/history/") and isinstance(body, dict):
            for run_id in body:
                record = parse_history(body, run_id)
                assert record is not None
                yield run_id, record


@pytest.mark.parametrize("version", VERSIONS)
def test_every_recorded_message_has_a_known_shape(version: str) -> None:
    unknown = set()
    for scenario in scenarios(version):
        for events in scenario["events"].values():
            for event in (event for event in events if isinstance(event, list)):
                message = parse_message(json.dumps({"type": event[0], "data": event[1]}))
                unknown |= {message.kind} if isinstance(message, UnknownMessage) else set()
    assert unknown <= {"feature_flags"}


@pytest.mark.parametrize("version", VERSIONS)
def test_socket_and_history_lead_to_the_same_end(version: str) -> None:
    compared = 0
    for scenario in scenarios(version):
        ends = heard(scenario)
        for run_id, record in kept(scenario):
            find_outputs(record.outputs, record.cached)
            if run_id in ends:
                assert type(ends[run_id]) is type(record.end), scenario["name"]
                compared += 1
    assert compared > 10


@pytest.mark.parametrize("version", VERSIONS)
def test_every_recorded_refusal_can_be_told(version: str) -> None:
    told = 0
    for scenario in scenarios(version):
        for step in scenario["steps"]:
            request, response = step.get("request", {}), step.get("response", {})
            body = response.get("json")
            if request.get("path", "").endswith("/prompt") and response.get("status") == 400:
                prompt = request.get("json", {}).get("prompt") if "json" in request else {}
                assert refusal_from(body, prompt if isinstance(prompt, dict) else {}).message
                told += 1
    assert told > 10


def test_both_versions_lead_to_the_same_ends() -> None:
    ends = [
        {
            scenario["name"]: sorted(type(end).__name__ for end in heard(scenario).values())
            for scenario in scenarios(version)
            # 0.7.0 has no such routes, so nothing is cancelled there.
            if scenario["kind"] != "cancel"
        }
        for version in VERSIONS
    ]
    assert ends[0] == ends[1]


def test_every_run_that_is_heard_to_end_is_heard_to_be_over() -> None:
    whole = (s for s in scenarios("0.28.0") if "loose" not in s and s["kind"] != "interrupt")
    for scenario in whole:
        for events in scenario["events"].values():
            messages = [
                parse_message(json.dumps({"type": event[0], "data": event[1]}))
                for event in events
                if isinstance(event, list)
            ]
            successes = {m.run_id for m in messages if isinstance(m, Succeeded)}
            assert successes <= {m.run_id for m in messages if isinstance(m, RunOver)}
