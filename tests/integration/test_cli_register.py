"""`comfyfleet admin workflows register --from FILE`: what it reads, and what it says of mistakes."""

from pathlib import Path

import pytest
from tests.support.server.commands import EXAMPLES, NEGATIVE, comfyfleet

from comfyfleet.cli.admin.catalog import parse_property, read_registrations
from comfyfleet.cli.context import process_context
from comfyfleet.errors import InvalidInput

PROPERTIES = EXAMPLES / "properties.yaml"


def registrations(path: Path, only: str | None = None) -> list[dict[str, object]]:
    return read_registrations(path, only, process_context())


def test_a_file_says_it_all_for_several_workflows() -> None:
    found = {each["slug"]: each for each in registrations(PROPERTIES)}
    assert list(found) == ["negative", "soften", "video", "measure", "similarity"]
    for each in found.values():
        assert each["document"]
        assert each["properties"]
        assert "file" not in each
    for slug in ("negative", "soften", "video"):
        assert "nodes" in found[slug]["document"]  # type: ignore[operator]
        assert found[slug]["price_tokens"]


def test_the_guide_shows_each_of_them() -> None:
    guide = (EXAMPLES.parent / "docs" / "how-to" / "register-workflows.md").read_text()
    command = "$ comfyfleet admin workflows register --from examples/properties.yaml\n"
    shown = guide.partition(command)[2].partition("```")[0].splitlines()
    slugs = [each["slug"] for each in registrations(PROPERTIES)]
    assert shown == [f"workflow {slug} has version 1" for slug in slugs]


def test_one_of_them_can_be_chosen() -> None:
    assert [each["slug"] for each in registrations(PROPERTIES, "soften")] == ["soften"]
    with pytest.raises(InvalidInput, match="has no workflow softn; it has soften"):
        registrations(PROPERTIES, "softn")


def test_a_document_is_found_from_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "there.json").write_bytes(Path(NEGATIVE).read_bytes())
    file = tmp_path / "w.yaml"
    file.write_text("mine: {file: there.json}\nthere:\n")
    assert [each["slug"] for each in registrations(file)] == ["mine", "there"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- a\n", "must map workflow slugs"),
        ("", "must map workflow slugs"),
        ("a: [1]\n", "a must be an object"),
        ("a: {propertis: []}\n", "a has the unknown field propertis"),
        ("a: {file: none.json}\n", "was not found"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "w.yaml"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=problem):
        registrations(file)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "specify the workflow's slug and file"),
        (("x",), "specify the workflow's slug and file"),
        (("x", NEGATIVE, "--from", str(PROPERTIES)), "can't be combined with other options"),
        (("--from", str(PROPERTIES), "--price", "3"), "can't be combined with other options"),
    ],
)
def test_both_ways_at_once_or_none_are_refused(arguments: tuple[str, ...], problem: str) -> None:
    result = comfyfleet("admin", "workflows", "register", *arguments)
    assert result.code == 1
    assert problem in result.err


def test_a_type_that_is_misspelt_is_told_with_the_closest() -> None:
    with pytest.raises(InvalidInput, match="unknown type integr") as raised:
        parse_property("width:integr=2.width")
    assert raised.value.details["hint"] == "Did you mean integer?"
