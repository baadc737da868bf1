"""The examples become what ComfyUI's editor (frontend 1.58.1) made of them, as recorded beside this test."""

import json
from pathlib import Path
from typing import Any

import pytest

from comfyfleet.workflow import convert

EXAMPLES = Path(__file__).parents[2] / "examples"
RECORDED = Path(__file__).parent / "examples"
NAMES = sorted(path.stem for path in (EXAMPLES / "workflows").glob("*.json"))


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_an_example_becomes_what_the_editor_made_of_it(name: str) -> None:
    prompt = convert(
        read(EXAMPLES / "workflows" / f"{name}.json"), read(EXAMPLES / "object_info.json")
    )
    for entry in prompt.values():
        del entry["_meta"]
    assert prompt == read(RECORDED / f"{name}.json")


def test_the_examples_use_every_node_type_of_their_object_info() -> None:
    used = {
        entry["class_type"] for name in NAMES for entry in read(RECORDED / f"{name}.json").values()
    }
    switched_off = {"PreviewImage"}
    assert used | switched_off == set(read(EXAMPLES / "object_info.json"))
