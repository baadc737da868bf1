"""Small pipelines and trees for tests."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from comfyfleet.server.pipelines.model import (
    PipelineCandidate,
    PipelineDefinition,
    RunLimits,
    RunTree,
    Step,
    StoredPipelineRun,
)

NOW = datetime(2026, 3, 1, 12, 30, 5, tzinfo=UTC)
RUN = StoredPipelineRun(UUID(int=1), base_candidates=3)


def steps(*steps: dict[str, Any]) -> PipelineDefinition:
    made = [Step(f"step {n}", "workflow", **fields) for n, fields in enumerate(steps)]
    return PipelineDefinition("test", tuple(made))


def candidate(
    number: int, step: int = 0, parent: int | None = None, **fields: Any
) -> PipelineCandidate:
    """Numbered by age."""
    return PipelineCandidate(
        UUID(int=number),
        step,
        NOW + timedelta(seconds=number),
        parent=None if parent is None else UUID(int=parent),
        **fields,
    )


def tree(*candidates: PipelineCandidate, **fields: Any) -> RunTree:
    return RunTree({each.id: each for each in candidates}, **fields)


def run(base: int = 3, **limits: Any) -> StoredPipelineRun:
    return StoredPipelineRun(UUID(int=1), base_candidates=base, limits=RunLimits(**limits))
