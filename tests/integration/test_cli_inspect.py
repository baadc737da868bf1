"""`comfyfleet inspect`: tables for people, JSON for programs."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from tests.support.server.commands import EXAMPLES, NEGATIVE, OBJECT_INFO, SOFTEN, comfyfleet

from comfyfleet.workflow.inspect import results

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "inspect-json.md"


def section(out: str, title: str) -> list[str]:
    """The rows under a heading, without its column names; runs of spaces are one."""
    rows = out.split(f"\n{title}\n", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    return [" ".join(row.split()) for row in rows]


def inspected(*arguments: str, width: int = 80, terminal: bool = False) -> str:
    result = comfyfleet("inspect", *arguments, width=width, terminal=terminal)
    assert (result.code, result.err) == (0, "")
    return result.out


def test_a_workflow_is_told_in_tables() -> None:
    out = inspected(NEGATIVE, "--object-info", OBJECT_INFO, width=120)
    assert out.splitlines()[0] == f"{NEGATIVE}: a workflow; 4 nodes to run"
    assert section(out, "Takes") == [
        "2.width --size 384 Canvas INT 1 – 16384",
        "2.height --size 384 Canvas INT 1 – 16384",
        "2.batch_size --batch 1 Canvas INT 1 – 4096",
        "4.filename_prefix --prefix negative_384 Save Image STRING",
        "3:7.scale_by 0.5 Shrink and invert.scale_by FLOAT 0.01 – 8",
        "and 2 other values (--all shows them)",
    ]
    assert section(out, "Makes") == ["4 image Save Image negative_384"]
    assert section(out, "Switched off") == ["5 Before muted"]
    assert "Nothing is missing on the server." in out
    assert f"comfyfleet convert {NEGATIVE} --set 2.width=…" in out


def test_all_values_are_told_on_request() -> None:
    out = inspected(NEGATIVE, "--object-info", OBJECT_INFO, "--all", width=120)
    assert len(section(out, "Takes")) == 7


def test_what_is_missing_is_told() -> None:
    out = inspected(SOFTEN, "--object-info", OBJECT_INFO)
    assert section(out, "Missing on the server") == [
        "input file photo.png; upload it before running"
    ]


def test_without_a_server_it_says_what_one_would_add() -> None:
    assert "--server URL or --object-info FILE" in inspected(NEGATIVE)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", ["negative", "soften", "video"])
def test_tables_keep_to_the_width_of_a_terminal(name: str, width: int) -> None:
    path = EXAMPLES / "workflows" / f"{name}.json"
    out = inspected(str(path), "--object-info", OBJECT_INFO, width=width, terminal=True)
    tables = [line for line in out.splitlines() if line.startswith("  ")]
    assert max(map(len, tables)) <= width


def test_json_is_all_that_goes_to_stdout() -> None:
    result = comfyfleet("inspect", SOFTEN, "--object-info", OBJECT_INFO, "--json")
    assert result.err == ""
    found = result.json
    assert found["takes"][0]["address"] == "1.image"
    assert found["takes"][0]["node"] == {
        "id": "1", "class_type": "LoadImage", "title": "Photo", "path": [],
    }  # fmt: skip
    assert found["missing"]["files"] == ["photo.png"]


def test_notes_go_to_stderr(tmp_path: Path) -> None:
    path = tmp_path / "flow.json"
    node = {"id": 1, "type": "EmptyImage", "widgets_values": [1]}
    path.write_text(json.dumps({"nodes": [node], "links": [], "version": 0.4}))
    result = comfyfleet("inspect", str(path), "--object-info", OBJECT_INFO)
    assert result.lines[0].startswith("warning: node 1 EmptyImage was saved with 1 value, fewer")


def test_what_repeats_is_told_with_how_to_keep_less_of_it() -> None:
    out = inspected(SOFTEN, "--object-info", OBJECT_INFO)
    assert section(out, "Groups") == ["Pass 1 1", "Pass 2 1", "Pass 3 1"]
    assert section(out, "Chains")[0] == "Pass 3 Pass 1 to Pass 3"
    assert "--segments N" in out


def test_every_key_of_the_json_is_documented_and_nothing_else() -> None:
    documented = set(re.findall(r"^\| `([a-z_.]+)` \|", REFERENCE.read_text(), re.MULTILINE))
    classes = {
        "": results.Inspection, "takes": results.InspectedInput, "makes": results.InspectedOutput, "files": results.NamedFile,
        "node_types": results.UsedType, "packs": results.UsedPack, "groups": results.GroupSummary,
        "chains": results.ChainSummary, "subgraphs": results.SubgraphSummary, "switched_off": results.SwitchedOff, "node": results.NodeRef,
        "missing": results.MissingParts, "missing.node_types": results.MissingType,
        "missing.values": results.RefusedValue, "missing.inputs": results.LostInput,
    }  # fmt: skip
    actual = {
        f"{name}.{each.name}".lstrip(".") for name, kind in classes.items() for each in fields(kind)
    }
    assert documented == actual
