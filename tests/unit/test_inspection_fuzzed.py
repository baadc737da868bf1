"""Whatever a document holds, inspecting it ends in a result or an error of ours."""

import contextlib
import json
from dataclasses import asdict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.small_server import OBJECT_INFO

from comfyfleet.errors import FleetError
from comfyfleet.workflow.embedded import Opened
from comfyfleet.workflow.inspect import inspect

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from(["", "a.safetensors", "cat.png [output]", "embedding:x", "randomize", "x" * 600]),
)  # fmt: skip
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
CLASSES = st.sampled_from([*OBJECT_INFO, "Unknown", "PrimitiveNode", "Reroute", "sub"])
NAMES = st.sampled_from(["seed", "text", "image", "value", "resize_type", "ckpt_name", "rounds"])
SLOTS = st.fixed_dictionaries(
    {"name": NAMES, "type": st.just("INT"), "link": st.none() | st.integers(1, 4)},
    optional={"widget": st.fixed_dictionaries({"name": NAMES}) | ANYTHING},
)
NODES = st.fixed_dictionaries(
    {"id": st.integers(1, 5), "type": CLASSES},
    optional={
        "mode": st.sampled_from([0, 2, 4]),
        "title": ANYTHING,
        "widgets_values": st.lists(ANYTHING, max_size=8) | ANYTHING,
        "inputs": st.lists(SLOTS, max_size=4),
        "properties": st.dictionaries(
            st.sampled_from(["cnr_id", "aux_id", "ver", "models"]), ANYTHING, max_size=3
        ),
    },
)
ENDS = st.sampled_from([-10, -20, 1, 2, 3, 4, 5])
LINKS = st.tuples(
    st.integers(1, 4), ENDS, st.integers(0, 2), ENDS, st.integers(0, 2), st.just("INT")
).map(list)
DEFINITIONS = st.fixed_dictionaries(
    {
        "id": st.just("sub"),
        "name": st.text(max_size=3),
        "nodes": st.lists(NODES, max_size=3),
        "links": st.lists(LINKS, max_size=3),
        "inputs": st.lists(
            st.fixed_dictionaries(
                {"name": NAMES, "type": st.just("INT"), "linkIds": st.lists(st.integers(1, 4), max_size=2)}
            ),
            max_size=2,
        ),
    }
)  # fmt: skip
WORKFLOWS = st.fixed_dictionaries(
    {"nodes": st.lists(NODES, max_size=5), "links": st.lists(LINKS, max_size=4)},
    optional={
        "definitions": st.fixed_dictionaries({"subgraphs": st.lists(DEFINITIONS, max_size=1)}),
        "models": ANYTHING,
        "groups": ANYTHING,
    },
)
ENTRIES = st.fixed_dictionaries(
    {"class_type": CLASSES | ANYTHING},
    optional={"inputs": st.dictionaries(NAMES, ANYTHING) | ANYTHING, "_meta": ANYTHING},
)
PROMPTS = st.dictionaries(st.text("123", max_size=2), ENTRIES | ANYTHING, max_size=5)


@settings(max_examples=40, deadline=None)
@given(WORKFLOWS, st.none() | PROMPTS, st.booleans())
def test_any_workflow(workflow: dict[str, Any], prompt: Any, with_server: bool) -> None:
    with contextlib.suppress(FleetError):
        opened = Opened("json", workflow, prompt)
        json.dumps(asdict(inspect(opened, OBJECT_INFO if with_server else None)))


@settings(max_examples=40, deadline=None)
@given(PROMPTS, st.booleans())
def test_any_prompt(prompt: dict[str, Any], with_server: bool) -> None:
    with contextlib.suppress(FleetError):
        opened = Opened("json", None, prompt)
        json.dumps(asdict(inspect(opened, OBJECT_INFO if with_server else None)))
