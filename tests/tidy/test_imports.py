"""What a control plane does not import: each of these costs memory and time at every start."""

import json
import subprocess
import sys

# The engine's packages are 36 MB, and only a worker runs an engine. httpx is made for the first call
# to a customer's address.
NOT_IMPORTED = ["PIL", "av", "boto3", "comfyfleet.engine", "httpx", "numpy"]
PROGRAM = """
import json, sys
import comfyfleet.cli.serve, comfyfleet.server.http.app
from comfyfleet.server.catalog.service import engine_object_info
assert "LoadImage" in engine_object_info()
print(json.dumps(sorted(sys.modules)))
"""


def test_a_control_plane_knows_the_engines_nodes_without_importing_it() -> None:
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert set(NOT_IMPORTED) & set(json.loads(told.stdout)) == set()
