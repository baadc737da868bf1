"""How a pipeline run stands, step by step: wanted, made, approved, in flight, failed."""

from collections.abc import Sequence
from typing import NamedTuple

from comfyfleet.pipelines.decide import parents_in_order
from comfyfleet.pipelines.model import JobInFlight, Pipeline, PipelineRun, Status, Tree


class StepRow(NamedTuple):
    name: str
    wanted: int  # as things stand: for the parents that there are now
    made: int
    approved: int
    rejected: int
    in_flight: int
    failed: int


def board(
    pipeline: Pipeline, run: PipelineRun, tree: Tree, in_flight: Sequence[JobInFlight]
) -> list[StepRow]:
    parents = parents_in_order(pipeline, tree)
    rows: list[StepRow] = []
    for number, step in enumerate(pipeline.steps):
        made = [each.status for each in tree.candidates.values() if each.step == number]
        mothers = [each for each in parents if each.step == number - 1]
        wanted = len(mothers) * step.children_per_parent if number else run.base_candidates
        row = StepRow(
            step.name,
            wanted=wanted,
            made=len(made),
            approved=sum(each in (Status.APPROVED, Status.WINNER) for each in made),
            rejected=made.count(Status.REJECTED),
            in_flight=sum(each.step == number for each in in_flight),
            failed=sum(each.step == number for each in tree.failed),
        )
        rows.append(row)
    return rows


def success_rate(tree: Tree) -> float | None:
    """Of the jobs that ended; None while there are none."""
    done = len({each.job_id for each in tree.candidates.values()})
    ended = done + len(tree.failed)
    return done / ended if ended else None
