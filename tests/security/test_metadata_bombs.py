"""Files made to keep whoever takes their prompts out of them busy."""

import struct
import subprocess
import sys
from pathlib import Path

from comfyfleet.wire.metadata import strip_metadata

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


def test_a_model_nested_without_an_end_stays_as_it_is(tmp_path: Path) -> None:
    path, length = tmp_path / "bomb.glb", 300_000
    bomb = struct.pack("<4sIII4s", b"glTF", 2, 20 + length, length, b"JSON") + b"[" * length
    path.write_bytes(bomb)
    assert strip_metadata(path) == len(bomb)
    assert path.read_bytes() == bomb
