"""What docs/reference says is what the code does."""

import re
import subprocess
import sys
from pathlib import Path

from comfyfleet.cli.main import app

COMMANDS_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "commands.md"
TOOL = Path(__file__).parents[2] / "tools" / "reference.py"


def test_generated_references_are_up_to_date() -> None:
    found = subprocess.run(
        [sys.executable, str(TOOL), "--check"], capture_output=True, text=True, check=False
    )
    assert found.stderr.strip() == "", "run: make docs"
    assert found.returncode == 0


def listed_options() -> dict[str, set[str]]:
    """The long options of each command on the page."""
    sections = re.split(r"^#+ (comfyfleet.*)$", COMMANDS_PAGE.read_text(), flags=re.MULTILINE)
    found = dict[str, set[str]]()
    for command, section in zip(sections[1::2], sections[2::2], strict=True):
        rows = re.findall(r"^\* `([^`]+)`", section, flags=re.MULTILINE)
        found[command] = {name for row in rows for name in re.findall(r"(?<!\S)--[\w-]+", row)}
    return found


def accepted_options(command: str) -> set[str]:
    _, apps, unknown = app.parse_commands(command.split()[1:])
    assert unknown == [], command
    with app.app_stack(apps):
        if not apps[-1].default_command:
            return set()
        shown = [each for each in apps[-1].assemble_argument_collection() if each.show]
        return {name for each in shown for name in each.names if name.startswith("--")}


def test_the_listed_options_are_those_that_the_commands_accept() -> None:
    listed = listed_options()
    assert len(listed) > 150
    assert "--no-reuse" in listed["comfyfleet admin effects change"]
    for command, options in listed.items():
        assert options == accepted_options(command), command
