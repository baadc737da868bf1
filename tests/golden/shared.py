"""Where the data lies that is shared with this project but is no part of it."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A worktree lies elsewhere than the checkout, so it may be told.
SHARED = Path(os.environ.get("COMFYFLEET_SHARED", ROOT.parent / "shared"))
ENGINE = SHARED / "engine"
