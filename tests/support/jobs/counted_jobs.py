"""Jobs that take a known time, and whose executions can be counted afterwards."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from tests.support.server.admin_client import until
from tests.support.server.deployment import Deployment, EngineProcess

FLEET, WORKFLOW = "gpus", "steps"
STEP_MS = 100
BEGIN_SECONDS_MAX = 60.0
PROPERTIES = [
    {"name": "color", "type": "integer", "binding": "1.color", "default": 0},
    {"name": "steps", "type": "integer", "binding": "2.steps", "default": 10},
]
# The color makes each job's prompt another one, so that nothing comes from the engine's cache.
PROMPT = {
    "1": {
        "class_type": "EmptyImage",
        "inputs": {"width": 16, "height": 16, "batch_size": 1, "color": 0},
    },
    "2": {
        "class_type": "ComfyfleetSteps",
        "inputs": {"steps": 10, "step_ms": STEP_MS, "previews": False, "image": ["1", 0]},
    },
    "3": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "job"}},
}


def prepare(deployment: Deployment) -> tuple[str, str]:
    """Sets up a fleet with the workflow; returns the fleet's secret and a tenant's id."""
    deployment.start_control()
    secret = deployment.admin.create_fleet(FLEET)
    deployment.admin.register_workflow(WORKFLOW, PROMPT, PROPERTIES, "3")
    deployment.admin.assign(FLEET, WORKFLOW)
    return secret, deployment.admin.create_tenant("acme")


def submit(
    deployment: Deployment, tenant_id: str, colors: Iterable[int], *, steps: int
) -> dict[str, int]:
    """Submits a job of `steps` tenths of a second for each color; returns job ids with their colors."""
    return {
        deployment.admin.submit(tenant_id, WORKFLOW, {"color": color, "steps": steps}): color
        for color in colors
    }


def color_of(prompt: dict[str, Any]) -> int:
    return int(prompt["1"]["inputs"]["color"])


def executions(engines: Iterable[EngineProcess]) -> Counter[int]:
    """How often each color's prompt was started, on all engines together."""
    return Counter(
        color_of(record["prompt"][2]) for engine in engines for record in engine.history().values()
    )


def in_mid_job(
    engine: EngineProcess, *, is_told: Callable[[int], bool] = lambda color: True
) -> int:
    """Waits until a prompt has started and `is_told` holds while it runs; returns its color."""
    before = _running(engine)
    found: list[int] = []

    def is_in_mid_job() -> bool:
        found[:] = _running(engine)
        return found not in (before, []) and is_told(found[0]) and _running(engine) == found

    until(
        is_in_mid_job,
        seconds=BEGIN_SECONDS_MAX,
        what=lambda: f"nothing begins at {engine.process.name}",
        look_seconds=0.02,
    )
    return found[0]


def _running(engine: EngineProcess) -> list[int]:
    return [color_of(each) for each in engine.running()]
