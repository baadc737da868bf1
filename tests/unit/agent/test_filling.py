"""The names that a backend gave to files go to where the assets say."""

from typing import Any

import pytest

from comfyfleet.agent.filling import filled
from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.wire.files import Asset

PROMPT: dict[str, Any] = {
    "5:1": {"class_type": "Load", "inputs": {"image": "old", "a.b": "old"}},
    "x.y": {"class_type": "Load", "inputs": {"path": "dir/FILE", "image": "old"}},
}


def asset(**where: str) -> tuple[Asset, ...]:
    return (Asset(name="input", filename="f.png", url="http://x", **where),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("binding", "node", "name"),
    [("5:1.image", "5:1", "image"), ("5:1.a.b", "5:1", "a.b"), ("x.y.image", "x.y", "image")],
)
def test_ids_and_inputs_may_both_hold_dots(binding: str, node: str, name: str) -> None:
    prompt = filled(PROMPT, {"input": "new.png"}, asset(binding=binding))
    assert prompt[node]["inputs"][name] == "new.png"
    assert PROMPT[node]["inputs"][name] == "old"


def test_a_placeholder_is_replaced_inside_a_text() -> None:
    prompt = filled(PROMPT, {"input": "new.png"}, asset(placeholder="FILE"))
    assert prompt["x.y"]["inputs"]["path"] == "dir/new.png"


@pytest.mark.parametrize("binding", ["7.image", "5:1", "5:1."])
def test_a_binding_to_nowhere_is_refused(binding: str) -> None:
    with pytest.raises(InvalidInput, match="binding"):
        filled(PROMPT, {"input": "new.png"}, asset(binding=binding))
