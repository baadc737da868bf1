"""Shows the main job on the embedded defaults. `make demo` runs it."""

import os
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from comfyfleet.cli.main import run
from comfyfleet.cli.world import real_world

ROOT = Path(__file__).parents[1]
WORKFLOW = "examples/workflows/negative.json"
NODE_TYPES = ("--object-info", "examples/object_info.json")
PROMPT = "demo-output/negative.prompt.json"
STEPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "What does a workflow take, make and need? This one is in the format of ComfyUI's editor.",
        ("inspect", WORKFLOW, *NODE_TYPES),
    ),
    (
        "Now the prompt that ComfyUI executes, the same that its editor would send, only smaller.",
        ("convert", WORKFLOW, *NODE_TYPES, "--set", "Shrink.scale_by=0.25", "-o", PROMPT),
    ),
    (
        "A prompt is a file like any other: its subgraph is expanded, its muted node gone.",
        ("inspect", PROMPT, *NODE_TYPES, "--all"),
    ),
)
NEXT = f"""Try with a file of yours (a workflow, or a picture that ComfyUI saved), and your ComfyUI:

  .venv/bin/comfyfleet inspect cat.png
  .venv/bin/comfyfleet convert cat.png --server http://127.0.0.1:8188 -o cat.prompt.json
  .venv/bin/comfyfleet convert --help

The prompt is in {PROMPT}, more workflows are in examples/workflows."""


def main() -> int:
    os.chdir(ROOT)
    Path(PROMPT).parent.mkdir(exist_ok=True)
    console = Console(highlight=False)
    for words, arguments in STEPS:
        console.rule(style="dim")
        console.print(Text(words, style="bold"))
        console.print(Text(f"$ comfyfleet {' '.join(arguments)}\n", style="cyan"), soft_wrap=True)
        code = run(arguments, real_world())
        if code:
            return code
        console.print()
    console.rule(style="dim")
    console.print(Text(NEXT), soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
