import inspect
from pathlib import Path

import pytest
from tests.unit.engine.node_runs import NODES

from comfyfleet.engine.node import Interface, integer

HERE = Path(__file__).parent


def test_every_node_type_has_a_case_of_its_own() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in HERE.glob("test_engine_*.py"))
    assert not [name for name in NODES if f'"{name}"' not in tests]


def test_the_registry_has_comfyuis_nodes_and_four_of_our_own() -> None:
    own = sorted(name for name in NODES if name.startswith("Comfyfleet"))
    assert own == ["ComfyfleetFail", "ComfyfleetMeasure", "ComfyfleetPassFile", "ComfyfleetSteps"]
    without_pictures = {"CheckpointLoaderSimple", "KSamplerSelect", "SaveImageWebsocket"}
    assert len(NODES) == 45 + 26 + len(without_pictures) + len(own)


@pytest.mark.parametrize("name", sorted(NODES))
def test_an_entry_is_whole(name: str) -> None:
    info = NODES[name].info
    assert info["name"] == name
    assert info["display_name"]
    assert len(info["output"]) == len(info["output_name"]) == len(info["output_is_list"])
    assert info["input_order"] == {group: list(found) for group, found in info["input"].items()}


@pytest.mark.parametrize("name", sorted(NODES))
def test_a_node_takes_every_input_that_it_declares(name: str) -> None:
    function = inspect.unwrap(NODES[name].run)
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    groups = NODES[name].info["input"]
    declared = {**groups["required"], **groups.get("optional", {})}
    assert declared.keys() == parameters.keys() - {"context"}


def test_later_nodes_say_more_about_themselves_than_classic_ones() -> None:
    def entry(*, classic: bool) -> set[str]:
        inputs = {"x": integer(1)}
        interface = Interface("X", "X", "m", "c", inputs, ("INT",), classic=classic)
        return set(interface.entry())

    assert entry(classic=False) - entry(classic=True) == {
        "output_tooltips",
        "output_matchtypes",
        "deprecated",
        "experimental",
        "dev_only",
        "api_node",
        "price_badge",
        "essentials_category",
    }
