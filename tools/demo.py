"""Shows the main job on the embedded defaults. `make demo` runs it."""

import os
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from comfyfleet.cli.main import run
from comfyfleet.cli.world import real_world

ROOT = Path(__file__).parents[1]
OUTPUT = "demo-output"
PICTURE, CLIP = "examples/workflows/soften.json", "examples/workflows/video.json"
STEPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "A workflow in the format of ComfyUI's editor: what does it take, make and need?",
        ("inspect", PICTURE, "--object-info", "examples/object_info.json"),
    ),
    (
        "Run it with a picture. No server is named, so the built-in engine runs it, on the CPU.",
        ("run", PICTURE, "--image", "examples/inputs/photo.png", "-o", OUTPUT),
    ),
    (
        "A video: its frames are inverted, its sound and frame rate stay.",
        ("run", CLIP, "--video", "examples/inputs/clip.mp4", "-o", OUTPUT),
    ),
)
NEXT = """The results are in {folder}:

{files}

Try with a file of yours (a workflow, or a picture that ComfyUI saved), and your ComfyUI:

  .venv/bin/comfyfleet inspect cat.png
  .venv/bin/comfyfleet run cat.png --server http://127.0.0.1:8188
  .venv/bin/comfyfleet run --help

More workflows are in examples/workflows."""


def main() -> int:
    os.chdir(ROOT)
    shutil.rmtree(OUTPUT, ignore_errors=True)
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
    console.print(Text(NEXT.format(folder=OUTPUT, files=_made())), soft_wrap=True)
    return 0


def _made() -> str:
    files = sorted(Path(OUTPUT).iterdir())
    return "\n".join(f"  {file}  {file.stat().st_size:,} bytes" for file in files)


if __name__ == "__main__":
    sys.exit(main())
