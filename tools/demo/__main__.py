"""Starts a local demo, creates its sample data, prints its URL, and runs until Ctrl-C.

python -m demo              stores data in a temporary folder
python -m demo --once       stops as soon as the sample data is complete
python -m demo --folder DIR keeps data, results and logs in this folder
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
            console.print(
                f"[bold]comfyfleet[/] is starting at [cyan]{processes.url}/[/]. Creating sample data:"
            )
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
    parser.add_argument(
        "--once", action="store_true", help="stop as soon as the sample data is complete"
    )
    parser.add_argument("--folder", type=Path, help="keep data, results and logs in this folder")
    parser.add_argument("--port", type=int, help="default: 8000, or a free port if 8000 is in use")
    return parser.parse_args()


@contextlib.contextmanager
def _folder(chosen: Path | None) -> Iterator[Path]:
    if chosen is None:
        with tempfile.TemporaryDirectory(prefix="comfyfleet-demo-", ignore_cleanup_errors=True) as temporary:  # fmt: skip
            yield Path(temporary)
    else:
        chosen.mkdir(parents=True, exist_ok=True)
        yield chosen.resolve()


async def _show(demo: Demo, *, once: bool) -> None:
    async with demo.opened():
        content = await demo.make()
        if once:
            _print_summary(content)
            return
        link = demo.processes.sign_in_link()
        _print_summary(content)
        console.print("\nTo sign in, open this link. It works only once:\n")
        console.print(f"  [cyan]{link}[/]\n")
        console.print(f"For a new link, run: comfyfleet open --data {demo.processes.data}")
        console.print(
            "\nThe demo keeps running, and new jobs arrive from time to time. Press [bold]Ctrl-C[/]"
            " to stop it."
        )
        if has_display(os.environ):
            # Some programs that open a browser only return when it is closed.
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
    raise FleetError(f"{name} stopped unexpectedly. Its log ends with: {processes.log_end(name)}")


def _print_summary(content: Content) -> None:
    url = content.url
    jobs = ", ".join(f"{count} {status}" for status, count in content.counts.items())
    lines = (
        ("Catalog", f"{url}/", "choose an effect and upload a photo"),
        ("Results", f"{url}/results", f"one job is running, one failed: {url}/results/{content.failed_id}"),
        ("Graphs", f"{url}/graph-runs/{content.asking_run_id}", "a run that is waiting for your answer"),
        ("Pipeline", f"{url}/pipelines/{content.pipeline_id}/runs/{content.pipeline_run_id}", f"{content.candidates} candidates to judge"),
        ("Triggers", f"{url}/triggers", "a schedule that has fired, and a webhook"),
        ("Console", f"{url}/console", f"jobs: {jobs}; workers: {', '.join(content.workers)}"),
        ("API", f"{url}/docs", "API reference"),
    )  # fmt: skip
    console.print("\nThese pages have sample data:\n")
    for name, address, text in lines:
        console.print(f"  {name:<10} [cyan]{address}[/]  [dim]{text}[/]")
    console.print(f"\nFor commands in a shell, set COMFYFLEET_URL={url} and one of these keys:")
    console.print(f"  customer  COMFYFLEET_KEY={content.customer_key}")
    console.print(f"  operator  COMFYFLEET_KEY={content.admin_key}")


if __name__ == "__main__":
    sys.exit(main())
