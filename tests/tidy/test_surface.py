"""What programs outside of this repository use stays as it is, unless somebody means to change it."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "surface.py"


def test_the_outside_is_as_it_was() -> None:
    found = subprocess.run(
        [sys.executable, str(TOOL), "--check"], capture_output=True, text=True, check=False
    )
    assert found.stderr.strip() == ""
    assert found.returncode == 0
