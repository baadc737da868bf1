"""Names of uploaded files in prompts."""

import copy

import pytest

from comfyfleet.api.values import Asset
from comfyfleet.errors import InvalidInput
from comfyfleet.worker.job_files import changed_inputs, fill_prompt

PROMPT = {
    "1": {"class_type": "LoadImage", "inputs": {"image": "old.png", "size": 3}},
    "5:2": {"class_type": "Text", "inputs": {"text": "a {{photo}} of {{photo}}", "on": [True]}},
}


def asset(binding: str | None = None, placeholder: str | None = None) -> Asset:
    return Asset(
        name="input",
        filename="cat.png",
        url="http://x",
        binding=binding,
        placeholder=placeholder,
    )


def test_a_bound_input_gets_the_name_and_nothing_else_changes() -> None:
    before = copy.deepcopy(PROMPT)
    new = fill_prompt(PROMPT, {"input": "sub/cat (1).png"}, (asset(binding="1.image"),))
    assert new["1"]["inputs"] == {"image": "sub/cat (1).png", "size": 3}
    assert new["5:2"] == PROMPT["5:2"]
    assert before == PROMPT


def test_a_node_inside_a_subgraph_is_found() -> None:
    new = fill_prompt(PROMPT, {"input": "x"}, (asset(binding="5:2.text"),))
    assert new["5:2"]["inputs"]["text"] == "x"


def test_a_placeholder_is_replaced_wherever_it_stands() -> None:
    before = copy.deepcopy(PROMPT)
    new = fill_prompt(PROMPT, {"input": 'c"at.png'}, (asset(placeholder="{{photo}}"),))
    assert new["5:2"]["inputs"]["text"] == 'a c"at.png of c"at.png'
    assert before == PROMPT


@pytest.mark.parametrize("binding", ["7.image", "image", ".", ""])
def test_a_binding_to_nowhere_is_refused(binding: str) -> None:
    with pytest.raises(InvalidInput, match="isn't in the prompt"):
        fill_prompt(PROMPT, {"input": "x"}, (asset(binding=binding),))


def test_without_assets_the_prompt_is_as_it_was() -> None:
    assert fill_prompt(PROMPT, {}, ()) == PROMPT


@pytest.mark.parametrize(
    ("binding", "node", "name"),
    [("5:1.image", "5:1", "image"), ("5:1.a.b", "5:1", "a.b"), ("x.y.image", "x.y", "image")],
)
def test_ids_and_inputs_may_both_hold_dots(binding: str, node: str, name: str) -> None:
    prompt = {
        "5:1": {"class_type": "Load", "inputs": {"image": "old", "a.b": "old"}},
        "x.y": {"class_type": "Load", "inputs": {"path": "dir/FILE", "image": "old"}},
    }
    new = fill_prompt(prompt, {"input": "new.png"}, (asset(binding=binding),))
    assert new[node]["inputs"][name] == "new.png"


def test_what_was_filled_in_is_told_by_node_and_input() -> None:
    prompt = {"1": {"inputs": {"image": "", "keep": 1}}, "2": {"inputs": {"images": ["1", 0]}}}
    sent = {"1": {"inputs": {"image": "cf/a.png", "keep": 1}}, "2": prompt["2"]}
    assert changed_inputs(prompt, sent) == {"1": {"image": "cf/a.png"}}
    assert changed_inputs(prompt, prompt) == {}
