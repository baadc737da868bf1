"""Whatever comes in: a prompt, or an error of ours. Never another exception, never a hang."""

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.workflow.builders import CLASSES, node, subgraph, workflow

from comfyfleet.errors import FleetError, InvalidWorkflow
from comfyfleet.workflow import convert, convert_with_report

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from(["Source", "Sampler", "sub", "Reroute", "SetNode", "GetNode", "PrimitiveNode"]),
)  # fmt: skip
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)
# Enough to notice a slip; the slow test looks a hundred times longer.
QUICK = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)  # fmt: skip


def everything() -> dict[str, Any]:
    """A workflow with a bit of all that there is."""
    inner = subgraph(
        "sub",
        [node(21, "Sampler", ("image", 1), ("steps", 2), widgets_values=[1, "fixed", 11])],
        [[1, -10, 0, 21, 0], [2, -10, 1, 21, 2], [3, 21, 0, -20, 0]],
        [("image", "IMAGE", [1]), ("steps", "INT", [2])],
        [("out", "IMAGE", [3])],
    )
    group = {"nodes": [{"type": "Invert"}, {"type": "Invert"}], "links": [[0, 0, 1, 0, 1, "IMAGE"]]}
    nodes = [
        node(1, "Source", widgets_values=[64]),
        node(2, "Reroute", ("", 1)),
        node(
            3,
            "sub",
            ("image", 2),
            widgets_values=[5],
            properties={"proxyWidgets": [["21", "seed"]]},
        ),
        node(4, "Invert", ("image", 3), mode=4),
        node(5, "SetNode", ("IMAGE", 4), widgets_values=["x"]),
        node(6, "GetNode", widgets_values=["x"]),
        node(7, "workflow>grp", ("image", 5)),
        node(8, "Resize", ("image", 6), widgets_values=["to", 1, 2, True]),
        node(9, "SaveImage", ("images", 7), widgets_values=["%Source.size%"]),
        node(10, "PrimitiveNode", outputs=[{"type": "INT"}], widgets_values=[9]),
        node(11, "Stack", ("images.image0", 8)),
    ]
    links = [
        [1, 1, 0, 2, 0, "IMAGE"], [2, 2, 0, 3, 0, "IMAGE"], [3, 3, 0, 4, 0, "IMAGE"],
        [4, 4, 0, 5, 0, "IMAGE"], [5, 6, 0, 7, 0, "IMAGE"], [6, 7, 0, 8, 0, "IMAGE"],
        [7, 8, 0, 9, 0, "IMAGE"], [8, 1, 0, 11, 0, "IMAGE"], [9, 10, 0, 8, 2, "INT"],
    ]  # fmt: skip
    extra = {"groupNodes": {"grp": group}}
    return workflow(nodes, links, definitions={"subgraphs": [inner]}, extra=extra, last_node_id=11)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    return [path, *(place for key in keys for place in places(value[key], (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    if not path:
        return by
    changed = copy.copy(value)
    changed[path[0]] = replaced(value[path[0]], path[1:], by)
    return changed


def prompt_or_our_error(document: Any, object_info: Any = CLASSES) -> None:
    try:
        made = convert_with_report(document, object_info)
    except FleetError:
        return
    json.dumps(made.prompt, allow_nan=False).encode()


def test_the_workflow_with_everything_converts() -> None:
    prompt = convert(everything(), CLASSES)
    assert prompt["9"]["inputs"]["filename_prefix"] == "64"
    assert prompt["3:21"]["inputs"]["steps"] == 5


@QUICK
@given(JSON)
def test_any_json(document: Any) -> None:
    prompt_or_our_error(document)


@QUICK
@given(
    st.lists(
        st.dictionaries(st.sampled_from(["id", "type", "mode", "inputs", "widgets_values"]), JSON),
        max_size=4,
    ),
    JSON,
)
def test_any_nodes_and_links(nodes: Any, links: Any) -> None:
    prompt_or_our_error({"nodes": nodes, "links": links})


@QUICK
@given(st.data())
def test_any_part_of_a_workflow_replaced_by_anything(data: st.DataObject) -> None:
    replace_anything(data)


@pytest.mark.slow
@settings(QUICK, max_examples=4_000)
@given(st.data())
def test_many_parts_of_a_workflow_replaced_by_anything(data: st.DataObject) -> None:
    replace_anything(data)


def replace_anything(data: st.DataObject) -> None:
    document = everything()
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(document)))
        document = replaced(document, path, data.draw(JSON))
    before = copy.deepcopy(document)
    prompt_or_our_error(document)
    assert repr(document) == repr(before)


@QUICK
@given(st.data())
def test_any_part_of_an_object_info_replaced_by_anything(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(places(CLASSES)))
    prompt_or_our_error(everything(), replaced(CLASSES, path, data.draw(JSON)))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "node 1 Source › input size: nan is not a valid JSON number"),
        ("\ud800", "half a character"),
        (json.loads("[" * 200 + "]" * 200), "nested too deeply"),
    ],
)
def test_a_value_that_json_cannot_hold_is_refused_with_its_place(value: Any, words: str) -> None:
    with pytest.raises(InvalidWorkflow) as refused:
        convert(workflow([node(1, "Source", widgets_values=[value])]), CLASSES)
    assert words in str(refused.value)


@pytest.mark.parametrize("kind", ["Reroute", "Invert", "SetNode"])
def test_a_long_chain_with_many_consumers_is_walked_once(kind: str) -> None:
    """Quadratic work would take minutes here."""
    length = 1_500
    nodes = [node(0, "Source")]
    links = []
    for index in range(1, length):
        nodes.append(node(index, kind, ("image" if kind == "Invert" else "", index), mode=4))
        links.append([index, index - 1, 0, index, 0, "IMAGE"])
    for index in range(length, 2 * length):
        nodes.append(node(index, "SaveImage", ("images", index)))
        links.append([index, length - 1, 0, index, 0, "IMAGE"])
    prompt = convert(workflow(nodes, links), CLASSES)
    assert prompt[str(2 * length - 1)]["inputs"]["images"] == ["0", 0]
