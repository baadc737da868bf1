"""Which workflows the editor offers to begin with."""

import json
from pathlib import Path
from typing import Any

import pytest

from comfyfleet.server.http.gateway.templates import (
    OWN_FOLDER,
    Templates,
    installed_templates,
    node_types,
)

OFFERED = ("EmptyImage", "LoadImage", "ImageInvert", "SaveImage")


def graph(*types: str, **more: Any) -> dict[str, Any]:
    return {"nodes": [{"type": each} for each in types], **more}


def written(folder: Path, **workflows: dict[str, Any]) -> Path:
    folder.mkdir()
    for name, workflow in workflows.items():
        (folder / f"{name}.json").write_text(json.dumps(workflow))
    entries = [{"name": name, "io": {}, "thumbnail": ["a"]} for name in [*workflows, "no_file"]]
    index = [{"title": folder.name, "templates": entries}]
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def names(templates: Templates, index: str = "index.json") -> list[str]:
    return [
        entry["name"] for each in templates.index(index, OFFERED) for entry in each["templates"]
    ]


def test_a_template_needs_every_node_type_that_it_runs(tmp_path: Path) -> None:
    runs, lacks = graph("EmptyImage", "SaveImage"), graph("KSampler", "SaveImage")
    assert names(Templates((written(tmp_path / "a", runs=runs, lacks=lacks),))) == ["runs"]


def test_a_category_of_which_nothing_can_be_run_is_left_out(tmp_path: Path) -> None:
    templates = Templates((written(tmp_path / "a", lacks=graph("KSampler")),))
    assert templates.index("index.json", OFFERED) == []


def test_files_of_other_hosts_are_not_named(tmp_path: Path) -> None:
    templates = Templates((written(tmp_path / "a", runs=graph("SaveImage")),))
    assert templates.index("index.json", OFFERED)[0]["templates"] == [{"name": "runs"}]


def test_a_language_without_an_index_has_the_usual_one(tmp_path: Path) -> None:
    templates = Templates((written(tmp_path / "a", runs=graph("SaveImage")),))
    assert names(templates, "index.de.json") == ["runs"]


def test_nodes_in_subgraphs_count_and_those_that_are_muted_do_not() -> None:
    inner = {"id": "sub", **graph("ImageInvert")}
    workflow = graph("sub", "Note", "SaveImage", definitions={"subgraphs": [inner]})
    workflow["nodes"].append({"type": "KSampler", "mode": 4})
    assert node_types(workflow) == {"ImageInvert", "SaveImage"}


def test_our_own_run_without_a_model() -> None:
    own = names(Templates((OWN_FOLDER,)))
    assert own == ["comfyfleet_colour", "comfyfleet_negative"]


def test_those_of_comfyui_come_after_our_own() -> None:
    pytest.importorskip("comfyui_workflow_templates_json", reason="needs the extra editor")
    found = installed_templates()
    assert found.folders[0] == OWN_FOLDER
    everything = found.index("index.json", _Everything())
    assert sum(len(each["templates"]) for each in everything) > 100


class _Everything(frozenset[str]):
    """A fleet that has all node types there are."""

    def __contains__(self, name: object) -> bool:
        return True
