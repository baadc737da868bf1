"""Shorthands on workflows that people made. Needs the recordings beside the checkout."""

import gzip
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from comfyfleet.workflow import convert
from comfyfleet.workflow.edit import shorthand_places
from comfyfleet.workflow.edit.input_lookup import read_entries
from comfyfleet.workflow.edit.prompt_flow import Flow
from comfyfleet.workflow.edit.samplers import samplers

SHARED = Path(os.environ.get("COMFYFLEET_SHARED", Path(__file__).parents[3] / "shared"))
ORACLE = SHARED / "oracle"
pytestmark = pytest.mark.skipif(
    not ORACLE.is_dir(), reason=f"the editor's recordings are not at {ORACLE}"
)
# The rest are pictures, models and sounds that are made without a text, a noise or a size of their own.
LEAST_SHARES = {"prompt": 0.95, "negative": 0.65, "seed": 0.97, "size": 0.72, "model": 0.97}


def sampled_prompts() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    with gzip.open(ORACLE / "object_info.core.json.gz", "rt", encoding="utf-8") as file:
        object_info = json.load(file)
    with gzip.open(ORACLE / "core.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            prompt = convert(json.loads(line)["workflow"], object_info)
            if samplers(Flow(read_entries(prompt, object_info))):
                yield prompt, object_info


def test_most_workflows_with_a_sampler_have_the_usual_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found: Counter[str] = Counter()
    for prompt, object_info in sampled_prompts():
        found["all"] += 1
        for name in LEAST_SHARES:
            places = shorthand_places(prompt, object_info, name)
            found[name] += bool(places)
            titles = [prompt[place.node_id]["_meta"]["title"].lower() for place in places]
            other_side = {"prompt": "negative", "negative": "positive"}.get(name, "\0")
            assert not any(other_side in title for title in titles), titles
    with capsys.disabled():
        print(f"\nshorthands found: {dict(found)}")  # noqa: T201
    for name, share in LEAST_SHARES.items():
        assert found[name] >= share * found["all"], name
