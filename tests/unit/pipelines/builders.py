"""Small pipelines and trees for tests."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from comfyfleet.pipelines.model import Candidate, Limits, Pipeline, PipelineRun, Step, Tree

NOW = datetime(2026, 3, 1, 12, 30, 5, tzinfo=UTC)
RUN = PipelineRun(UUID(int=1), base_candidates=3)


def steps(*steps: dict[str, Any]) -> Pipeline:
    made = [Step(f"step {n}", "workflow", **fields) for n, fields in enumerate(steps)]
    return Pipeline("test", tuple(made))


def candidate(number: int, step: int = 0, parent: int | None = None, **fields: Any) -> Candidate:
    """Numbered by age."""
    return Candidate(
        UUID(int=number),
        step,
        NOW + timedelta(seconds=number),
        parent=None if parent is None else UUID(int=parent),
        **fields,
    )


def tree(*candidates: Candidate, **fields: Any) -> Tree:
    return Tree({each.id: each for each in candidates}, **fields)


def run(base: int = 3, **limits: Any) -> PipelineRun:
    return PipelineRun(UUID(int=1), base_candidates=base, limits=Limits(**limits))
