"""What is not imported at a start: each package costs memory and time."""

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


def imported_by(program: str) -> set[str]:
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(json.loads(told.stdout.splitlines()[-1]))


def test_a_control_plane_knows_the_engines_nodes_without_importing_it() -> None:
    assert set(NOT_IMPORTED) & imported_by(PROGRAM) == set()


def test_conversion_needs_nothing_but_the_standard_library() -> None:
    program = """
import json, sys
before = set(sys.modules)
import comfyfleet.workflow
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""
    assert imported_by(program) - set(sys.stdlib_module_names) == {"comfyfleet"}


def test_help_imports_no_command() -> None:
    program = """
import json, sys
from comfyfleet.cli.context import process_context
from comfyfleet.cli.main import run
assert run(["--help"], process_context()) == 0
print(json.dumps(sorted(sys.modules)))
"""
    heavy = {"asyncio", "fastapi", "httpx", "pydantic", "sqlalchemy", "websockets", "yaml"}
    found = imported_by(program)
    assert heavy & found == set()
    ours = {name for name in found if name.startswith("comfyfleet.")}
    assert ours == {
        "comfyfleet.cli", "comfyfleet.cli.context", "comfyfleet.cli.help_texts",
        "comfyfleet.cli.main", "comfyfleet.errors",
    }  # fmt: skip
