"""Entry point: one file per command group, errors of ours become one line and exit code 1."""

from cyclopts import App

from comfyfleet import __version__
from comfyfleet.cli.engine import engine

app = App(
    name="comfyfleet",
    help="Run ComfyUI as a production service: any saved workflow, any number of GPUs, one durable queue.",
    version=__version__,
)
app.command(engine)


def main() -> None:
    app()
