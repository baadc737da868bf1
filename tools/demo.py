"""Shows the main job on the embedded defaults, as a customer has it. `make demo` runs it.

It starts `comfyfleet up` (control plane, worker and built-in engine), sets up a tenant with a wallet and
three effects as an operator would, and applies each as a customer would, over HTTP. The server stays up
until Ctrl-C, unless DEMO_ONCE is set.
"""

import asyncio
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from comfyfleet.client import Client, JobEvent
from comfyfleet.errors import FleetError

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
OUTPUT = ROOT / "demo-output"
LOG = OUTPUT / "server.log"
COMMAND = (sys.executable, "-c", "from comfyfleet.cli import main; main()")
PORT = 8000
START_SECONDS_MAX = 60
STOP_SECONDS_MAX = 30
JOB_SECONDS_MAX = 300
TOKENS = 100
console = Console(highlight=False)


@dataclass(frozen=True)
class Shown:
    """An effect of the demo: its workflow, its price, and what it is applied to."""

    slug: str
    title: str
    price_tokens: int
    properties: tuple[Mapping[str, Any], ...]
    media: str | None = None
    chosen: Mapping[str, Any] = field(default_factory=dict)


EFFECTS = (
    Shown(
        "negative",
        "A picture out of nothing",
        2,
        (
            {"name": "width", "type": "integer", "binding": "2.width", "minimum": 16, "maximum": 1024},
            {"name": "height", "type": "integer", "binding": "2.height", "minimum": 16, "maximum": 1024},
        ),
        chosen={"width": 512, "height": 256},
    ),
    Shown(
        "soften",
        "A photo, softened in three passes",
        3,
        (
            {"name": "input", "type": "image", "binding": "1.image"},
            {"name": "size", "type": "integer", "binding": "6.resize_type.longer_size", "default": 256},
        ),
        media="photo.png",
        chosen={"size": 320},
    ),
    Shown(
        "video",
        "A clip with its colours inverted",
        10,
        ({"name": "input", "type": "video", "binding": "1.file"},),
        media="clip.mp4",
    ),
)  # fmt: skip


def main() -> int:
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir()
    console.print(
        "[bold]comfyfleet[/]: control plane, worker and CPU engine start on this machine…"
    )
    admin_key = secrets.token_hex(16)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with server(admin_key) as (url, process):
            try:
                asyncio.run(demo(url, admin_key))
            except FleetError as error:
                console.print(f"[red]{error.message}[/] (the server's log is in {shown(LOG)})")
                return 1
            if not os.environ.get("DEMO_ONCE"):
                stay(process)
    except KeyboardInterrupt:
        pass
    console.print("Stopped")
    return 0


@contextmanager
def server(admin_key: str) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """`comfyfleet up` in a process of its own, with data that each demo begins anew."""
    url = f"http://127.0.0.1:{free_port()}"
    environ = {name: value for name, value in os.environ.items() if "COMFYFLEET_" not in name}
    with LOG.open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - our own command
            [*COMMAND, "up", "--port", url.rpartition(":")[2], "--data", str(OUTPUT / "data")],
            env={**environ, "COMFYFLEET_ADMIN_KEY": admin_key},
            stdout=log,
            stderr=log,
            # Ctrl-C is ours: it gets one signal to stop, and has the time that it needs.
            start_new_session=True,
        )
        try:
            yield url, process
        finally:
            stop(process)


def free_port() -> int:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", PORT))
        except OSError:
            listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def stay(process: "subprocess.Popen[bytes]") -> None:
    console.print("\nThe server stays up; [bold]Ctrl-C[/] stops it.")
    process.wait()


async def demo(url: str, admin_key: str) -> None:
    await answering(url)
    console.print(f"It answers at [cyan]{url}[/] (its API: [cyan]{url}/docs[/])\n")
    key = await set_up(url, admin_key)
    async with Client(url, key) as client:
        before = (await client.wallet()).balance
        console.print(f"\nThe customer's balance: [bold]{before} tokens[/]\n")
        for effect in EFFECTS:
            await applied(client, effect)
        after = (await client.wallet()).balance
        spent = sum(effect.price_tokens for effect in EFFECTS)
        console.print(
            f"\nBalance before: [bold]{before}[/], after: [bold]{after}[/] ({spent} spent)"
        )
        async for each in client.transactions():
            console.print(f"  [dim]{each.type:<15} {each.amount:+d}[/]")
    tell_next(url, key, admin_key)


async def answering(url: str) -> None:
    async with httpx.AsyncClient() as client:
        for _ in range(START_SECONDS_MAX * 10):
            try:
                if (await client.get(f"{url}/readyz")).is_success:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)
    raise FleetError(f"it does not answer after {START_SECONDS_MAX} s")


async def set_up(url: str, admin_key: str) -> str:
    """As an operator does it, once; answers the customer's key."""
    headers = {"Authorization": f"Bearer {admin_key}"}
    async with httpx.AsyncClient(base_url=f"{url}/api/admin", headers=headers, timeout=60) as admin:

        async def post(path: str, **body: Any) -> dict[str, Any]:
            response = await admin.post(path, json=body)
            if not response.is_success:
                raise FleetError(f"{path}: {response.text}")
            answer: dict[str, Any] = response.json()
            return answer

        for effect in EFFECTS:
            document = json.loads((EXAMPLES / "workflows" / f"{effect.slug}.json").read_text())
            await post(
                "/workflows", slug=effect.slug, document=document, properties=effect.properties
            )
            await post(
                "/effects",
                slug=effect.slug,
                workflow_slug=effect.slug,
                title=effect.title,
                price_tokens=effect.price_tokens,
                overrides={},
                published=True,
            )
            console.print(
                f"Effect [cyan]{effect.slug}[/]: {effect.title}, {effect.price_tokens} tokens"
            )
        tenant = await post("/tenants", name="Demo")
        wallet = f"/tenants/{tenant['id']}/wallets/{tenant['user_id']}"
        await post(f"{wallet}/credits", amount=TOKENS, provider_transaction_id="demo-1")
        console.print(f"Tenant [cyan]Demo[/] with a user, a key, and {TOKENS} tokens")
        key: str = tenant["key"]
        return key


async def applied(client: Client, effect: Shown) -> None:
    """Upload, apply, wait, download."""
    async with progress(effect.slug) as (bars, bar):
        media = None
        if effect.media:
            bars.update(bar, description=f"{effect.slug}: uploading {effect.media}")
            media = await client.upload(
                EXAMPLES / "inputs" / effect.media,
                effect=effect.slug,
                progress=lambda sent, total: bars.update(bar, completed=sent, total=total),
            )
        bars.reset(bar, total=100, description=f"{effect.slug}: queued")

        def told(event: JobEvent) -> None:
            if event.kind == "status":
                bars.update(bar, description=f"{effect.slug}: {event.data.get('status')}")
            elif event.percent is not None:
                bars.update(bar, completed=event.percent)

        handle = await client.apply(effect.slug, media, effect.chosen)
        await handle.wait(timeout_seconds=JOB_SECONDS_MAX, on_event=told)
        bars.update(bar, completed=100)
        files = await handle.download(OUTPUT)
    seconds = _seconds(handle.job.submitted_at, handle.job.completed_at)
    console.print(
        f"[green]✓[/] {effect.title} ({effect.slug}), {handle.job.price_tokens} tokens{seconds}"
    )
    for file in files:
        console.print(f"    {shown(file)}  [dim]{file.stat().st_size:,} bytes[/]")


def _seconds(begun: Any, ended: Any) -> str:
    return f", {(ended - begun).total_seconds():.1f} s" if begun and ended else ""


@asynccontextmanager
async def progress(slug: str) -> AsyncIterator[tuple[Progress, TaskID]]:
    columns = (TextColumn("  {task.description}"), BarColumn(bar_width=30))
    is_quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_quiet) as bars:
        yield bars, bars.add_task(slug, total=None)


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tell_next(url: str, key: str, admin_key: str) -> None:
    console.print(
        f"\nThe results are in {shown(OUTPUT)}. Try the API yourself, as the customer:\n\n"
        f"  curl -H 'Authorization: Bearer {key}' {url}/api/effects\n\n"
        "or as the operator:\n\n"
        f"  export COMFYFLEET_URL={url} COMFYFLEET_KEY={admin_key}\n"
        "  .venv/bin/comfyfleet admin dispatches list\n\n"
        "docs/quickstart.md goes through it step by step.",
        soft_wrap=True,
        markup=False,
    )


if __name__ == "__main__":
    sys.exit(main())
