"""What docs/reference says is what the code does."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "reference.py"


def test_generated_references_are_up_to_date() -> None:
    found = subprocess.run(
        [sys.executable, str(TOOL), "--check"], capture_output=True, text=True, check=False
    )
    assert found.stderr.strip() == "", "run: make docs"
    assert found.returncode == 0
