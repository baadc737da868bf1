"""Runs an example pipeline and exports its contact sheet. `make demo-pipeline` runs this script.

The script starts `comfyfleet up` with the default settings in a new folder, and registers the
example workflows and a tenant like an operator. Then it runs `comfyfleet pipeline run … --export`
like a customer.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
OUTPUT = Path(os.environ.get("DEMO_OUTPUT") or ROOT / "demo-output" / "pipeline")
COMMAND = (sys.executable, "-c", "from comfyfleet.cli import main; main()")
START_SECONDS_MAX = 60
WORKFLOWS = ("negative", "soften")
TOKENS = 500
BASE = 2


def main() -> int:
    OUTPUT.mkdir(parents=True, exist_ok=True)
    port, key = free_port(), secrets.token_hex(32)
    url = f"http://127.0.0.1:{port}"
    environ = {**os.environ, "COMFYFLEET_ADMIN_KEY": key}
    arguments = ("up", "--port", str(port), "--data", str(OUTPUT / "data"))
    with (OUTPUT / "server.log").open("wb") as log:
        server = subprocess.Popen(  # noqa: S603 - our own command
            [*COMMAND, *arguments], env=environ, stdout=log, stderr=log
        )
    try:
        with httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=30
        ) as admin:
            wait_until_ready(admin, server)
            customer = set_up(admin)
        return run(url, customer)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_until_ready(admin: httpx.Client, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if admin.get("/readyz").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"the control plane did not start; see {OUTPUT / 'server.log'}")


def post(admin: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = admin.post(f"/api/admin/{path}", json=body)
    if answer.status_code >= httpx.codes.BAD_REQUEST:
        raise SystemExit(f"{path}: {answer.text}")
    content: dict[str, Any] = answer.json()
    return content


def set_up(admin: httpx.Client) -> str:
    """Registers the workflows and a tenant. Returns the tenant's key.

    The embedded fleet is assigned every workflow that it can run, automatically.
    """
    registered = yaml.safe_load((EXAMPLES / "properties.yaml").read_text("utf-8"))
    for slug in WORKFLOWS:
        document = json.loads((EXAMPLES / "workflows" / f"{slug}.json").read_text("utf-8"))
        post(admin, "workflows", slug=slug, document=document, **registered[slug])
    tenant = post(admin, "tenants", name="Studio")
    wallet = f"tenants/{tenant['id']}/wallets/{tenant['user_id']}/credits"
    post(admin, wallet, amount=TOKENS, provider_transaction_id=f"demo-{tenant['id']}")
    return str(tenant["key"])


def run(url: str, key: str) -> int:
    arguments = (
        *("pipeline", "run", str(EXAMPLES / "pipelines" / "soft-colours.yaml")),
        *("--base", str(BASE), "--set", "colour=3368601", "--set", "width=256"),
        *("--concurrent", "2", "--folder", "soft-colours", "--export", str(OUTPUT)),
    )
    environ = {**os.environ, "COMFYFLEET_URL": url, "COMFYFLEET_KEY": key}
    return subprocess.run([*COMMAND, *arguments], env=environ, check=False).returncode  # noqa: S603


if __name__ == "__main__":
    sys.exit(main())
