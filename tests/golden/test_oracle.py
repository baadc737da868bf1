"""What the real editor made of 461 workflows. Needs the recordings beside the checkout."""

import copy
import gzip
import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from comfyfleet.workflow import convert

SHARED = Path(os.environ.get("COMFYFLEET_SHARED", Path(__file__).parents[3] / "shared"))
ORACLE = SHARED / "oracle"
pytestmark = pytest.mark.skipif(
    not ORACLE.is_dir(), reason=f"the editor's recordings are not at {ORACLE}"
)


class Recordings(NamedTuple):
    cases: str
    object_info: str
    misses_max: int


@cache
def load(name: str) -> Any:
    with gzip.open(ORACLE / name, "rt", encoding="utf-8") as file:
        return json.load(file)


def cases(name: str) -> Iterator[dict[str, Any]]:
    with gzip.open(ORACLE / name, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def without_meta(prompt: dict[str, Any]) -> dict[str, Any]:
    return {
        key: {field: value for field, value in node.items() if field != "_meta"}
        for key, node in prompt.items()
    }


@pytest.mark.parametrize(
    "recordings",
    [
        Recordings("core.jsonl.gz", "object_info.core.json.gz", 0),
        Recordings("synthetic.jsonl.gz", "object_info.custom.json.gz", 0),
        Recordings("custom.jsonl.gz", "object_info.custom.json.gz", 3),
    ],
    ids=lambda recordings: recordings.cases.split(".")[0],
)
def test_conversion_equals_the_editors(
    recordings: Recordings, capsys: pytest.CaptureFixture[str]
) -> None:
    object_info = load(recordings.object_info)
    total, misses = 0, []
    for case in cases(recordings.cases):
        total += 1
        given = copy.deepcopy(case["workflow"])
        made = json.loads(json.dumps(without_meta(convert(given, object_info)), allow_nan=False))
        assert given == case["workflow"], f"{case['name']}: the workflow was modified"
        if made != case["prompt"]:
            misses.append(case["name"])
    with capsys.disabled():
        print(f"\n{recordings.cases}: {total - len(misses)}/{total} exact", *misses, sep="\n  ")  # noqa: T201
    assert len(misses) <= recordings.misses_max, misses
