"""Files made to keep whoever takes their prompts out of them busy."""

import subprocess
import sys
from pathlib import Path

SECONDS_MAX = 60  # it takes a fraction of one; the expression before took hours
STRIP = """
import sys
from pathlib import Path
from comfyfleet.wire.metadata import strip_metadata
print(strip_metadata(Path(sys.argv[1])))
"""


def test_many_begins_of_notes_without_an_end_take_one_pass(tmp_path: Path) -> None:
    path = tmp_path / "bomb.svg"
    path.write_bytes(b"<svg><metadata>secret</metadata>" + b"<metadata>" * 400_000)
    # In a process that can be ended: an expression can't be interrupted.
    command = [sys.executable, "-c", STRIP, str(path)]
    subprocess.run(command, check=True, timeout=SECONDS_MAX)
    left = path.read_bytes()
    assert left == b"<svg>" + b"<metadata>" * 400_000
