"""Comfy API v2 without a server: progress, places in a stream, references, errors."""

from typing import Any
from uuid import uuid4

import pytest

from comfyfleet.errors import (
    FleetError,
    Forbidden,
    InsufficientTokens,
    InvalidInput,
    LimitExceeded,
    NotFound,
    QueueFull,
    TooManyCalls,
    Unauthenticated,
    Unavailable,
)
from comfyfleet.server.gateway.assets import check_path, parse_hash
from comfyfleet.server.gateway.v2_model import (
    EventPlace,
    LoggedProgress,
    decode_cursor,
    output_type,
    parse_place,
    parse_reference,
    references_in,
    with_names,
)
from comfyfleet.server.http.gateway.v2_errors import TooManyStreams, error_reply

PROMPT = {
    "1": {"class_type": "EmptyImage"},
    "2": {"class_type": "KSampler"},
    "9": {"class_type": "SaveImage"},
}


def progress_after(*events: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    progress = LoggedProgress(PROMPT)
    for event in events:
        progress.take(event)
    return progress.snapshot()


def test_progress_is_of_all_nodes_and_of_the_steps_of_one() -> None:
    told = progress_after(
        ("execution_start", {}),
        ("execution_cached", {"nodes": ["1"]}),
        ("executing", {"node": "2", "display_node": "2"}),
        ("progress", {"node": "2", "value": 5, "max": 20}),
    )
    assert told == {
        "value": (1 + 0.25) / 3,
        "nodes_done": 1,
        "nodes_total": 3,
        "current_node": "2",
        "current_node_class": "KSampler",
        "step": 5,
        "steps": 20,
        "message": "KSampler 5/20",
    }


def test_nodes_that_are_none_of_the_prompts_do_not_count() -> None:
    nodes = {
        "1": {"state": "finished"},
        "1.0.4": {"state": "finished", "display_node_id": "1"},
        "77": {"state": "finished"},
        "2": {"state": "running", "value": 1.0, "max": 4.0},
    }
    told = progress_after(("progress_state", {"nodes": nodes}))
    assert (told["nodes_done"], told["current_node"], told["step"]) == (1, "2", 1)
    assert told["value"] == pytest.approx(1.25 / 3)


def test_progress_is_never_above_one() -> None:
    done = [("executed", {"node": node_id}) for node_id in PROMPT]
    told = progress_after(*done, ("progress", {"node": "x", "value": 9, "max": 3}))
    assert told["value"] == 1.0


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (None, EventPlace()),
        ("17", EventPlace(row=17)),
        ("end.2", EventPlace(outputs=2)),
        ("end", EventPlace(is_over=True)),
        ("end.x", EventPlace()),
        ("-1", EventPlace()),
        ("9" * 40, EventPlace()),
        ("١٢", EventPlace(row=12)),
    ],
)
def test_a_last_event_id_is_a_place(text: str | None, place: EventPlace) -> None:
    assert parse_place(text) == place


@pytest.mark.parametrize("text", ["x", "", "é", "AAAA", "MjAyNi0wMS0wMSB4"])
def test_a_cursor_of_others_is_none(text: str) -> None:
    assert decode_cursor(text) is None


def test_references_are_found_at_any_depth_and_replaced() -> None:
    asset = {"__type": "core/ASSET", "info": {"id": "a", "hash": "blake3:00"}}
    workflow = {"1": {"inputs": {"image": asset, "list": [[asset, 5]]}}}
    (found, again) = references_in(workflow)
    assert found == again == asset
    named = with_names(workflow, {parse_reference(asset): "cat.png"})
    assert named == {"1": {"inputs": {"image": "cat.png", "list": [["cat.png", 5]]}}}
    assert workflow["1"]["inputs"]["image"] == asset


@pytest.mark.parametrize(
    ("key", "media_type", "kind"),
    [
        ("images", "image/png", "image"),
        ("images", "video/mp4", "video"),
        ("gifs", "image/gif", "video"),
        ("audio", "audio/flac", "audio"),
        ("latents", "application/octet-stream", "latent"),
        ("3d", "model/gltf-binary", "file"),
        ("other", "text/plain", "text"),
    ],
)
def test_outputs_are_of_the_kind_that_their_bytes_are(key: str, media_type: str, kind: str) -> None:
    assert output_type(key, media_type) == kind


@pytest.mark.parametrize(
    ("given", "path"),
    [("a.png", "a.png"), ("input/a.png", "a.png"), ("sub\\a.png", "sub/a.png"), ("input", "input")],
)
def test_a_path_is_inside_the_folder_of_inputs(given: str, path: str) -> None:
    assert check_path(given) == path


@pytest.mark.parametrize("given", ["", "..", "a/../b", "/a", "\\a", "models/vae/a", "a\0b"])
def test_a_path_that_leads_elsewhere_is_refused(given: str) -> None:
    with pytest.raises(InvalidInput):
        check_path(given)


@pytest.mark.parametrize("given", [None, 5, "00", "blake3:xyz", "sha256:" + "0" * 64])
def test_only_blake3_is_a_hash(given: object) -> None:
    with pytest.raises(InvalidInput):
        parse_hash(given)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Unauthenticated("x"), 401, "unauthorized"),
        (Forbidden("x"), 403, "forbidden"),
        (NotFound("x"), 404, "not_found"),
        (InsufficientTokens(required_tokens=5, balance=1), 402, "insufficient_credits"),
        (QueueFull("x", retry_after_seconds=7), 429, "queue_full"),
        (TooManyCalls("x", retry_after_seconds=7), 429, "rate_limited"),
        (TooManyStreams("x", retry_after_seconds=7), 429, "too_many_streams"),
        (LimitExceeded("x"), 413, "payload_too_large"),
        (InvalidInput("x"), 422, "invalid_request"),
        (Unavailable("x"), 503, "unavailable"),
    ],
)
def test_errors_have_the_codes_of_the_contract(error: FleetError, status: int, code: str) -> None:
    reply = error_reply(error)
    assert reply.status_code == status
    assert f'"code": "{code}"'.encode() in bytes(reply.body)
    if status == 429:
        assert reply.headers["retry-after"] == "7"


def test_a_reference_by_id_is_not_one_by_hash() -> None:
    info = {"id": str(uuid4()), "hash": "blake3:00", "file_path": "a.png"}
    found = parse_reference({"__type": "core/ASSET", "info": info})
    assert (found.shown, found.path) == (info["id"], "a.png")
