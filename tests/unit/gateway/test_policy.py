"""Which node types a stranger's prompt may use."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from comfyfleet.api.admin import FleetPrompts, TenantPrompts
from comfyfleet.server.catalog.service import engine_object_info
from comfyfleet.server.gateway.policy import (
    BY_OPERATOR,
    DENIED,
    HARMLESS,
    OTHER_SERVICE,
    UNKNOWN,
    NodePolicy,
    core_nodes,
    default_refusal,
    policy_of,
)

SHARED = Path(os.environ.get("COMFYFLEET_SHARED", Path(__file__).parents[4] / "shared"))
CORE = SHARED / "oracle" / "object_info.core.json.gz"
PLAIN = {"input": {"required": {"strength": ["FLOAT", {}]}}, "category": "image"}


def text_widget(name: str, kind: str = "STRING", **options: Any) -> dict[str, Any]:
    return {"input": {"required": {name: [kind, options]}}, "category": "custom"}


@pytest.mark.skipif(not CORE.is_file(), reason=f"ComfyUI's own object_info is not at {CORE}")
def test_every_node_of_comfyui_is_judged_and_none_is_unknown() -> None:
    with gzip.open(CORE, "rt", encoding="utf-8") as file:
        core = json.load(file)
    verdicts = {name: default_refusal(name, info) for name, info in core.items()}
    assert [name for name, reason in verdicts.items() if reason == UNKNOWN] == []
    assert sum(reason is None for reason in verdicts.values()) > 500
    services = {name for name, info in core.items() if info.get("api_node")}
    assert [name for name in services if verdicts[name] is None] == []
    assert verdicts["FluxProUltraImageNode"] == OTHER_SERVICE


def test_every_node_of_the_engine_is_judged() -> None:
    refused = {
        name: reason
        for name, info in engine_object_info().items()
        if (reason := default_refusal(name, info)) is not None
    }
    assert set(refused) <= set(DENIED)
    assert default_refusal("ComfyfleetSteps", {}) is None


def test_no_type_is_both_listed_as_harmless_and_denied() -> None:
    assert not core_nodes() & DENIED.keys()
    assert not core_nodes() & HARMLESS.keys()
    assert all(reason.endswith(".") for reason in (*DENIED.values(), *HARMLESS.values()))


def test_nodes_that_everybody_needs_may_run() -> None:
    for name in ("KSampler", "SaveImage", "LoadImage", "PreviewImage", "CheckpointLoaderSimple"):
        assert default_refusal(name, {}) is None


@pytest.mark.parametrize(
    ("name", "info"),
    [
        ("AnyLoader", text_widget("video_path")),
        ("AnyLoader", text_widget("videoPath")),
        ("AnyLoader", text_widget("output_folder")),
        ("AnyFetcher", text_widget("image_url")),
        ("AnyFetcher", text_widget("imageURL")),
        ("AnyNode", text_widget("python_code")),
        ("AnyNode", text_widget("cmd")),
        ("AnyNode", text_widget("script", "STRING,INT")),
        ("AnyNode", text_widget("path", forceInput=True)),
        ("RunPython", PLAIN),
        ("ShellCommand", PLAIN),
        ("LoadImageFromURL", PLAIN),
        ("VHS_LoadVideoPath", PLAIN),
        ("AnyNode", {**PLAIN, "api_node": True}),
        ("AnyNode", {**PLAIN, "category": "api node/video"}),
    ],
)
def test_a_custom_node_that_takes_a_path_a_url_code_or_a_command_is_denied_by_rule(
    name: str, info: dict[str, Any]
) -> None:
    reason = NodePolicy(allows_unknown=True).refusal(name, info)
    assert reason not in (None, UNKNOWN)


@pytest.mark.parametrize(
    ("name", "info"),
    [
        ("TextOnPath", PLAIN),
        ("AnySaver", text_widget("filename_prefix")),
        ("AnyNode", text_widget("prompt")),
        ("AnyNode", {"input": {"required": {"path": ["INT", {}]}}}),
        ("AnyNode", {}),
        ("AnyNode", {"input": None}),
        ("AnyNode", {"input": {"required": {"x": []}}}),
    ],
)
def test_another_custom_node_runs_only_where_unknown_ones_may(
    name: str, info: dict[str, Any]
) -> None:
    assert NodePolicy().refusal(name, info) == UNKNOWN
    assert NodePolicy(allows_unknown=True).refusal(name, info) is None


def test_an_operator_allows_by_pattern_and_what_is_denied_stays_denied() -> None:
    policy = policy_of(
        FleetPrompts(allow=("VHS_*", "LoadLatent"), deny=("KSampler*",)),
        TenantPrompts(allow=("KSampler", "CheckpointSave"), deny=("VHS_LoadVideoPath",)),
    )
    assert policy.refusal("VHS_LoadAudio", text_widget("audio_file")) is None
    assert policy.refusal("LoadLatent", {}) is None
    assert policy.refusal("CheckpointSave", {}) is None
    assert policy.refusal("KSampler", {}) == BY_OPERATOR
    assert policy.refusal("VHS_LoadVideoPath", {}) == BY_OPERATOR
    assert policy.refusal("vhs_loadaudio", {}) == UNKNOWN


@pytest.mark.parametrize("name", ["SaveImage\n", "saveimage", " SaveImage", "SaveImage\x00", ""])
def test_a_name_that_only_looks_like_a_known_one_is_not_it(name: str) -> None:
    assert default_refusal(name, {}) == UNKNOWN
