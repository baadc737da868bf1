"""The editor's rules, proved by cases of our own; `rules.md` lists them and says what a case is."""

import copy
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from comfyfleet.errors import FleetError
from comfyfleet.workflow import convert

HERE = Path(__file__).parent
CASES = sorted((HERE / "cases").iterdir())
WITH_PROMPT = [case for case in CASES if (case / "prompt.json").exists()]
WITH_ERROR = [case for case in CASES if (case / "error.txt").exists()]
WITH_META = [case for case in CASES if (case / "meta.json").exists()]
WITH_DEVIATION = [case for case in WITH_PROMPT if (case / "editor.json").exists()]
RULE = re.compile(r"^\| (?P<rule>.+) \| (?P<cases>`[^|]+`) \|$", re.MULTILINE)


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


OBJECT_INFO = read(HERE / "object_info.json")


class Draw(NamedTuple):
    """A die that always falls the same way."""

    value: float

    def random(self) -> float:
        return self.value


def options_of(case: Path) -> dict[str, Any]:
    path = case / "options.json"
    options: dict[str, Any] = read(path) if path.exists() else {}
    if "now" in options:
        options["now"] = datetime.fromisoformat(options["now"])
    if "random" in options:
        options["rng"] = Draw(options.pop("random"))
    return options


def converted(case: Path) -> dict[str, Any]:
    return convert(read(case / "ui.json"), OBJECT_INFO, **options_of(case))


def without_meta(prompt: dict[str, Any]) -> dict[str, Any]:
    return {
        key: {field: value for field, value in node.items() if field != "_meta"}
        for key, node in prompt.items()
    }


def canonical(value: Any) -> str:
    """Equal texts for equal JSON. Python takes true for 1; JavaScript writes 1.0 as 1."""
    return json.dumps(_whole(value), sort_keys=True, indent=1, allow_nan=False)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return value


def named(cases: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@named(WITH_PROMPT)
def test_the_prompt_is_the_recorded_one(case: Path) -> None:
    prompt = without_meta(converted(case))
    assert canonical(prompt) == canonical(read(case / "prompt.json"))


@named(WITH_ERROR)
def test_what_the_editor_throws_on_is_an_error_that_names_the_node(case: Path) -> None:
    with pytest.raises(FleetError) as raised:
        converted(case)
    assert (case / "error.txt").read_text(encoding="utf-8").strip() in raised.value.message


@named(WITH_META)
def test_nodes_are_described_as_the_editor_does(case: Path) -> None:
    meta = {key: node["_meta"] for key, node in converted(case).items()}
    assert meta == read(case / "meta.json")


@named(WITH_DEVIATION)
def test_where_we_differ_from_the_editor_there_is_a_reason(case: Path) -> None:
    editor = read(case / "editor.json")
    assert editor["why"]
    assert "error" in editor or canonical(editor["prompt"]) != canonical(read(case / "prompt.json"))


def test_what_goes_in_is_not_modified() -> None:
    object_info = copy.deepcopy(OBJECT_INFO)
    for case in WITH_PROMPT:
        workflow = read(case / "ui.json")
        convert(workflow, object_info, **options_of(case))
        assert workflow == read(case / "ui.json"), case.name
    assert object_info == OBJECT_INFO


def test_every_case_says_what_it_shows_and_what_comes_out() -> None:
    for case in CASES:
        sentence = (case / "rule.txt").read_text(encoding="utf-8")
        assert re.fullmatch(r"\S[^\n]+\.\n", sentence), case.name
        assert (case in WITH_PROMPT) != (case in WITH_ERROR), case.name


def test_every_rule_has_cases_and_every_case_has_a_rule() -> None:
    rows = RULE.findall((HERE / "rules.md").read_text(encoding="utf-8"))
    listed = {name for _, cases in rows for name in re.findall("`([^`]+)`", cases)}
    assert listed == {case.name for case in CASES}


def test_the_object_info_holds_nothing_that_no_case_needs() -> None:
    texts = [(case / "ui.json").read_text(encoding="utf-8") for case in CASES]
    unused = [name for name in OBJECT_INFO if not any(f'"{name}"' in text for text in texts)]
    assert not unused
