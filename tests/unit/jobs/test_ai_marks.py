"""Which files of a job are prepared for its customer, and with which mark."""

from typing import Any
from uuid import uuid4

import pytest

from comfyfleet.delivery import SourceType
from comfyfleet.server.catalog.model import AssetRef, RunTerms
from comfyfleet.server.jobs.ai_marks import delivery_rules
from comfyfleet.server.jobs.model import JobSpec

GENERATED, EDITED = SourceType.GENERATED, SourceType.EDITED
CHECKPOINT = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "sdxl.safetensors"}}
WAN = {"class_type": "UnetLoaderGGUF", "inputs": {"unet_name": "wan2.2.gguf"}}
PACK = {"class_type": "WanVideoModelLoader", "inputs": {"model": "wan.safetensors"}}
UPSCALER = {"class_type": "UpscaleModelLoader", "inputs": {"model_name": "4x.pth"}}
SEGMENTS = {"class_type": "SAM2ModelLoader", "inputs": {"model": "sam2.safetensors"}}
LORA = {"class_type": "LoraLoader", "inputs": {"lora_name": "fine.safetensors"}}
PHOTO = {"class_type": "LoadImage", "inputs": {"image": "style.png"}}
FILM = {"class_type": "VHS_LoadVideo", "inputs": {"video": "a.mp4"}}
SAVED = {"class_type": "SaveImage", "inputs": {"filename_prefix": "x"}}
ASSET = AssetRef("input", uuid4(), "image", "9.image")


def asked(*nodes: Any, assets: tuple[AssetRef, ...] = (), **changes: Any) -> JobSpec:
    given = {"user_id": uuid4(), **changes}
    prompt = {str(number): node for number, node in enumerate((*nodes, SAVED))}
    return JobSpec(1, "x", 1, prompt, assets=assets, **given)


def terms(ai_mark: Any = "auto", *, keeps_metadata: bool = False) -> RunTerms:
    return RunTerms(60, keeps_metadata, "required", ai_mark)


def mark(spec: JobSpec, found: RunTerms) -> SourceType | None:
    rules = delivery_rules(spec, found)
    return rules.mark if rules else None


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (asked(CHECKPOINT), GENERATED),
        (asked(CHECKPOINT, LORA), GENERATED),
        (asked(WAN), GENERATED),
        (asked(PACK), GENERATED),
        (asked(CHECKPOINT, assets=(ASSET,)), EDITED),
        (asked(CHECKPOINT, PHOTO), EDITED),
        (asked(PACK, FILM), EDITED),
        (asked(PHOTO), None),
        (asked(assets=(ASSET,)), None),
        (asked(UPSCALER, PHOTO), None),
        (asked(SEGMENTS, PHOTO), None),
        (asked(), None),
    ],
)
def test_the_mark_follows_from_the_prompt(spec: JobSpec, expected: SourceType | None) -> None:
    assert mark(spec, terms()) == expected


@pytest.mark.parametrize(
    ("ai_mark", "expected"), [("generated", GENERATED), ("edited", EDITED), ("none", None)]
)
def test_a_workflow_may_set_it(ai_mark: str, expected: SourceType | None) -> None:
    assert mark(asked(PHOTO), terms(ai_mark)) == expected
    assert mark(asked(CHECKPOINT), terms(ai_mark)) == expected


@pytest.mark.parametrize("changes", [{"user_id": None}, {"gateway": {"prompt_id": "x"}}])
def test_files_of_operators_and_of_the_gateway_are_not_prepared(changes: dict[str, Any]) -> None:
    assert delivery_rules(asked(CHECKPOINT, **changes), terms("generated")) is None


def test_kept_metadata_leaves_only_the_mark() -> None:
    rules = delivery_rules(asked(CHECKPOINT), terms(keeps_metadata=True))
    assert rules is not None
    assert (rules.strips, rules.mark) == (False, GENERATED)
    assert delivery_rules(asked(PHOTO), terms(keeps_metadata=True)) is None
