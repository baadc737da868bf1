"""Files of a backend that a prompt tries to name past the check, and folders that it tries to write to."""

from io import BytesIO
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from tests.support.backends.engine_client import EngineClient
from tests.support.server.customers import png
from tests.support.server.gateway import GatewayProcess, GatewayUser

SECRET, OWN = png(8, 200), png(8, 10)
NAME = "secret.png"
SWITCHED: dict[str, Any] = {
    "text": {"class_type": "PrimitiveString", "inputs": {"value": NAME}},
    "link": {
        "class_type": "ComfySwitchNode",
        "inputs": {"switch": True, "on_true": ["text", 0], "on_false": ["text", 0]},
    },
}
EMPTY: dict[str, Any] = {
    "class_type": "EmptyImage",
    "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0},
}


def load(image: Any) -> dict[str, Any]:
    return {"class_type": "LoadImage", "inputs": {"image": image}}


def save(source: str, **more: Any) -> dict[str, Any]:
    inputs = {"images": [source, 0], "filename_prefix": "x", **more}
    return {"class_type": "SaveImage", "inputs": inputs}


def wrapped(value: Any, times: int = 1) -> Any:
    return {"__value__": wrapped(value, times - 1)} if times else value


def shown(image: Any, **more: Any) -> dict[str, Any]:
    return {"load": load(image), "save": save("load"), **more}


HIDDEN_BEHIND_AN_UNKNOWN_INPUT = {
    "empty": EMPTY,
    "save": save("empty", nothing=["show", 0]),
    "show": {"class_type": "PreviewImage", "inputs": {"images": ["load", 0]}},
    "load": load(NAME),
}
# The file of the second node would be put into an input of the first, and its name be left as it is.
DOTTED = {
    "a": {**EMPTY, "inputs": {**EMPTY["inputs"], "b.image": NAME}},
    "a.b": load(NAME),
    "save": save("a.b"),
    "other": save("a"),
}
SMUGGLED: dict[str, dict[str, Any]] = {
    "the name": shown(NAME),
    "an output": shown(f"{NAME} [output]"),
    "wrapped": shown(wrapped(NAME)),
    "wrapped twice": shown(wrapped(NAME, 2)),
    "wrapped thrice": shown(wrapped(f"{NAME} [output]", 3)),
    "by a link": shown(["link", 0], **SWITCHED),
    "by a wrapped link": shown(wrapped(["link", 0]), **SWITCHED),
    "in a list": shown([NAME]),
    "in a wrapped list": shown(wrapped([NAME])),
    "behind an input that nobody declares": HIDDEN_BEHIND_AN_UNKNOWN_INPUT,
    "by a dot in an id": DOTTED,
}


def folder_of(gateway: GatewayProcess) -> Path:
    (found,) = gateway.folder.glob("engine-0")
    return found


def pictures(client: EngineClient, entry: Any) -> list[bytes]:
    listed = [
        each
        for output in entry["outputs"].values()
        for each in output.get("images", ())
        if isinstance(each, dict)
    ]
    return [client.http.get("/view", params=each).content for each in listed]


def shades(pictures: list[bytes]) -> set[int]:
    found: set[int] = set()
    for each in pictures:
        with PIL.Image.open(BytesIO(each)) as picture:
            found |= set(picture.convert("L").tobytes())
    return found


@pytest.mark.parametrize("name", SMUGGLED)
def test_a_prompt_gets_no_file_but_its_users_own(
    gateway: GatewayProcess, user: GatewayUser, name: str
) -> None:
    for folder in ("input", "output"):
        place = folder_of(gateway) / folder / NAME
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(SECRET)
    with user.open_engine_client() as client:
        if name == "by a dot in an id":
            client.http.post("/upload/image", files={"image": (NAME, OWN, "image/png")})
        sent = client.http.post("/prompt", json={"prompt": SMUGGLED[name]})
        if sent.status_code != 200:
            assert sent.status_code == 400
            return
        client.wait_idle()
        entry = client.history(sent.json()["prompt_id"])
        assert max(shades(pictures(client, entry)), default=0) < 100
        pytest.fail("it was sent to a backend")


def test_a_users_own_file_is_taken_however_it_is_wrapped_once(
    gateway: GatewayProcess, user: GatewayUser
) -> None:
    with user.open_engine_client() as client:
        client.http.post("/upload/image", files={"image": ("mine.png", OWN, "image/png")})
        for image in ("mine.png", wrapped("mine.png")):
            prompt_id = client.submit(shown(image))
            client.wait_idle()
            assert shades(pictures(client, client.history(prompt_id))) <= {9, 10}


def test_an_output_prefix_leads_into_the_folder_of_its_job_whoever_makes_it(
    gateway: GatewayProcess, user: GatewayUser
) -> None:
    made = {"class_type": "PrimitiveString", "inputs": {"value": "../../elsewhere/x"}}
    by_link = {"empty": EMPTY, "made": made, "save": save("empty", filename_prefix=["made", 0])}
    # A node that stands where the worker would put one of its own.
    taken = {
        "class_type": "PrimitiveString",
        "inputs": {"value": "elsewhere/x", "filename_prefix": ""},
    }
    by_place = {**by_link, "save.filename_prefix": taken}
    before = outside(gateway)
    with user.open_engine_client() as client:
        for prompt in (by_link, by_place):
            prompt_id = client.submit(prompt)
            client.wait_idle()
            entry = client.history(prompt_id)
            assert entry["status"]["status_str"] == "success", entry["status"]
            assert len(pictures(client, entry)) == 1
    assert outside(gateway) == before


def outside(gateway: GatewayProcess) -> set[str]:
    """Of the folders of jobs."""
    folder = folder_of(gateway) / "output"
    found = (each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file())
    return {each for each in found if not each.startswith("comfyfleet/")}
