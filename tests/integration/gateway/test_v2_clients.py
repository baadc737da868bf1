"""Comfy API v2 with its own SDKs, unmodified, from the registries."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.support.backends.prompts import new_color, slow
from tests.support.server.clients import node_command, node_folder, python_of, run_client
from tests.support.server.gateway import GatewayProcess, GatewayUser

PYTHON_SDK, NODE_SDK = "comfy-sdk==0.5.0", "@comfyorg/sdk@0.1.9"
SCRIPTS = Path(__file__).parent / "clients"
GREEN = (0, 255, 0)
# As either SDK names them.
ERRORS = {
    "reused": ["IdempotencyKeyReuse", "idempotency_key_reuse", 422],
    "invalid": ["InvalidWorkflow", "invalid_workflow", 422],
    "missing": ["NotFound", "not_found", 404],
    "no_asset": ["NotFound", "not_found", 404],
    "key": ["Unauthorized", "unauthorized", 401],
}


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    Image.new("RGB", (8, 8), GREEN).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def python_command(*arguments: str) -> list[str]:
    script = str(SCRIPTS / "comfy_sdk_run.py")
    return [str(python_of(PYTHON_SDK)), script, *arguments]


def script_command(*arguments: str) -> list[str]:
    package = node_folder(NODE_SDK) / "node_modules" / "@comfyorg" / "sdk"
    script = SCRIPTS / "comfyorg_sdk_run.mjs"
    return node_command(script, str(package / "dist" / "index.js"), *arguments)


def run_sdk(command: Any, user: GatewayUser, photo: Path, url: str) -> dict[str, Any]:
    arguments = str(photo), str(photo.with_name("out.png")), json.dumps(slow(new_color(), nodes=6))
    environ = {"COMFY_BASE_URL": url, "COMFY_API_KEY": user.key}
    done = run_client(command(*arguments), folder=photo.parent, environ=environ)
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


@pytest.mark.parametrize("command", [python_command, script_command], ids=["python", "node"])
def test_its_sdk_runs_a_workflow_with_an_upload(
    command: Any, gateway: GatewayProcess, user: GatewayUser, photo: Path
) -> None:
    seen = run_sdk(command, user, photo, user.url)
    assert seen["status"] == "succeeded"
    kinds = [kind.lower() for kind in seen["events"]]
    assert kinds[0] == kinds[-1] == "statuschange"
    assert kinds[-2] == "outputready"
    assert seen["values"][-1] == 1.0
    assert "89504e47" in seen["ready"]
    assert seen["names"] == ["sdk_00001_.png"]
    made = Image.open(io.BytesIO((photo.parent / "out.png").read_bytes()))
    assert made.convert("RGB").getpixel((0, 0)) == GREEN
    assert seen["part"] == "PNG"
    assert seen["url"].startswith(user.url)
    assert seen["format"] == "api"
    assert seen["deduplicated"] == [True, False]
    assert seen["made_by"] is True
    assert seen["cancelled"] == "canceled"
    assert {name: seen[name] for name in ERRORS} == ERRORS


def test_the_python_sdk_lists_by_labels(
    gateway: GatewayProcess, user: GatewayUser, photo: Path
) -> None:
    """Its address may have the key in it, too."""
    seen = run_sdk(python_command, user, photo, user.url_with_key)
    assert seen["metadata"] == {"client": "acme"}
    assert seen["listed"] == [True]
    assert seen["gone"] is False
