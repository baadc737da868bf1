"""The example pipeline runs with one command, on the embedded defaults, to its contact sheet."""

import json
import subprocess
import sys
from pathlib import Path

import PIL.Image
from tests.support.server.processes import clean_environ

DEMO = Path(__file__).parents[2] / "tools" / "pipeline.py"
RUN_SECONDS_MAX = 180


def test_one_command_ends_with_a_contact_sheet(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(DEMO)],
        env=clean_environ({"DEMO_OUTPUT": str(tmp_path)}),
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    index = json.loads((tmp_path / "index.json").read_text("utf-8"))
    assert len(index["candidates"]) == 2 + 4 + 8
    for each in index["candidates"]:
        assert (tmp_path / each["file"]).stat().st_size == each["size"]
    with PIL.Image.open(tmp_path / "contact-sheet.png") as sheet:
        assert min(sheet.size) > 400
