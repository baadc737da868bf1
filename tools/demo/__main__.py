"""`make demo`: starts everything here, fills it, prints the address, and stays up until Ctrl-C.

python -m demo              in a folder that is gone afterwards
python -m demo --once       ends as soon as everything was made
python -m demo --folder DIR keeps data, results and logs there
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
import webbrowser
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from comfyfleet.cli.up import has_display
from comfyfleet.errors import FleetError
from demo.content import Content, Demo
from demo.processes import Processes, control_plane

LOOK_SECONDS = 1.0
console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begun = time.monotonic()

    def say(text: str) -> None:
        console.print(f"  [green]✓[/] {text} [dim]{time.monotonic() - begun:.0f} s[/]")

    try:
        with _folder(options.folder) as folder, control_plane(folder, options.port) as processes:
            console.print(f"[bold]comfyfleet[/] starts at [cyan]{processes.url}/[/] and is filled:")
            asyncio.run(_show(Demo(processes, say), once=options.once))
    except FleetError as error:
        console.print(f"[red]{error.message}[/]")
        return 1
    except KeyboardInterrupt:
        pass
    console.print("Stopped")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--once", action="store_true", help="end as soon as everything was made")
    parser.add_argument("--folder", type=Path, help="keep data, results and logs in this folder")
    parser.add_argument("--port", type=int, help="default: 8000, or any if that is taken")
    return parser.parse_args()


@contextlib.contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is None:
        with tempfile.TemporaryDirectory(prefix="comfyfleet-demo-", ignore_cleanup_errors=True) as made:  # fmt: skip
            yield Path(made)
    else:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()


async def _show(demo: Demo, *, once: bool) -> None:
    async with demo.opened():
        content = await demo.make()
        if once:
            _tell(content)
            return
        link = demo.processes.sign_in_link()
        _tell(content)
        console.print("\nOpen this address first, and sign in with one click. It works once:\n")
        console.print(f"  [cyan]{link}[/]\n")
        console.print(f"For another one: comfyfleet open --data {demo.processes.data}")
        console.print(
            "\nIt stays up, and a customer comes by now and then. [bold]Ctrl-C[/] stops it."
        )
        if has_display(os.environ):
            # Some programs that open a browser return when it is closed.
            threading.Thread(target=webbrowser.open, args=(link,), daemon=True).start()
        busy = asyncio.create_task(demo.keep_busy())
        try:
            await _stay(demo.processes)
        finally:
            busy.cancel()
            console.print("Stopping…")


async def _stay(processes: Processes) -> None:
    while not (name := processes.ended()):  # noqa: ASYNC110 - other processes
        await asyncio.sleep(LOOK_SECONDS)
    raise FleetError(f"{name} has ended: {processes.last_words(name)}")


def _tell(content: Content) -> None:
    url = content.url
    jobs = ", ".join(f"{count} {status}" for status, count in content.counts.items())
    lines = (
        ("Catalogue", f"{url}/", "pick an effect, drop a photo"),
        ("Results", f"{url}/results", f"one runs, one failed: {url}/results/{content.failed_id}"),
        ("Graphs", f"{url}/graph-runs/{content.asking_run_id}", "waits for your answer"),
        ("Pipeline", f"{url}/pipelines/{content.pipeline_id}/runs/{content.pipeline_run_id}", f"{content.candidates} candidates to judge"),
        ("Triggers", f"{url}/triggers", "a schedule that was fired, and a webhook"),
        ("Console", f"{url}/console", f"jobs: {jobs}; workers: {', '.join(content.workers)}"),
        ("API", f"{url}/docs", "of all this"),
    )  # fmt: skip
    console.print("\nThese pages have something on them:\n")
    for name, address, text in lines:
        console.print(f"  {name:<10} [cyan]{address}[/]  [dim]{text}[/]")
    console.print(f"\nFrom a shell: COMFYFLEET_URL={url}")
    console.print(f"  as the customer  COMFYFLEET_KEY={content.customer_key}")
    console.print(f"  as the operator  COMFYFLEET_KEY={content.admin_key}")


if __name__ == "__main__":
    sys.exit(main())
