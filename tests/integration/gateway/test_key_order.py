"""JSON that passes through the gateway keeps the order of its keys and the precision of its numbers.

Clients assign the values of widgets to inputs by the order of keys, so a dict comparison isn't enough.
"""

import json
from typing import Any

import httpx
from tests.support.backends.engine_client import EngineClient
from tests.support.server.gateway import GatewayProcess, GatewayUser

LARGE = 2**63 + 1
# Neither alphabetical nor in the order in which the editor writes them.
PROMPT: dict[str, Any] = {
    "20": {
        "inputs": {"filename_prefix": "order", "images": ["3", 0]},
        "class_type": "SaveImage",
        "_meta": {"title": "Save"},
    },
    "3": {
        "_meta": {"title": "Color"},
        "inputs": {"width": 8, "color": 255, "height": 8, "batch_size": 1},
        "class_type": "EmptyImage",
    },
}
EXTRA_DATA: dict[str, Any] = {
    "zoom": 1.0,
    "small": 1e-07,
    "seed": LARGE,
    "extra_pnginfo": {"workflow": {"version": 0.4, "nodes": [], "extra": {"ds": {"scale": 2.0}}}},
}


def text(value: Any) -> str:
    return json.dumps(value)


def test_object_info_has_the_order_of_the_backend(
    gateway: GatewayProcess, user: GatewayUser
) -> None:
    direct = httpx.get(f"{gateway.engines[0].url}/object_info").json()
    with user.http() as http:
        through = http.get("/object_info").json()
        single = http.get("/object_info/EmptyImage").json()
    shown = {name: entry for name, entry in direct.items() if name in through}
    assert list(through) == list(shown)
    with_files = {name for name in shown if "upload" in text(shown[name])}
    assert len(shown) - len(with_files) > 20
    for name in shown.keys() - with_files:
        assert text(through[name]) == text(shown[name]), name
    for name in with_files:
        assert list(through[name]["input"]) == list(shown[name]["input"]), name
        for group, inputs in shown[name]["input"].items():
            assert list(through[name]["input"][group]) == list(inputs), name
    assert text(single) == text({"EmptyImage": direct["EmptyImage"]})


def test_a_prompt_is_shown_as_it_was_submitted(talk: EngineClient, user: GatewayUser) -> None:
    prompt_id = talk.submit(PROMPT, extra_data=EXTRA_DATA)
    talk.wait_idle()
    with user.http() as http:
        entry = http.get(f"/history/{prompt_id}").json()[prompt_id]
    _, _, prompt, extra_data, _ = entry["prompt"]
    assert text(prompt) == text(PROMPT)
    assert text({name: extra_data[name] for name in extra_data if name in EXTRA_DATA}) == text(
        EXTRA_DATA
    )


def test_workflows_and_settings_keep_their_order_and_numbers(user: GatewayUser) -> None:
    document = b'{"version":0.4,"nodes":[{"id":10,"pos":[1.0,2e3]}],"links":[],"a":1,"a":2}'
    settings = {"Comfy.Zoom": 1.0, "Comfy.Align": {"z": 1, "a": LARGE}}
    with user.http() as http:
        assert http.post("/userdata/order.json", content=document).status_code == 200
        assert http.get("/userdata/order.json").content == document
        assert http.post("/settings", json=settings).status_code == 200
        assert text(http.get("/settings").json()) == text(settings)
