"""A job of API v1 by our sign in its prompt: v1 does not let us choose ids."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from comfyfleet.comfy.calls import Call, Calls, json_of
from comfyfleet.comfy.cloud.marker import is_marked
from comfyfleet.comfy.cloud.patience import ask
from comfyfleet.comfy.cloud.v1_places import detail_of, queue_of
from comfyfleet.comfy.shapes import list_in, mapping_in, text_at

# Each costs a request of its own.
JOBS_SEARCHED_MAX = 100
ENDED = {
    "status": "completed,failed,cancelled",
    "sort_by": "create_time",
    "sort_order": "desc",
    "limit": str(JOBS_SEARCHED_MAX),
}
JOBS = Call("GET", "/jobs", params=ENDED)


@dataclass(frozen=True, slots=True)
class Search:
    """`is_complete`: all jobs were searched, so one that was not found is not there.

    `others`: ended jobs that are not it, and need not be asked for again.
    """

    run_id: str | None
    is_complete: bool = True
    others: frozenset[str] = frozenset()


async def search(calls: Calls, prompt_id: str, others: frozenset[str] = frozenset()) -> Search:
    """Queue first, then the ended: a job moves from one to the other, never back."""
    queue = await queue_of(calls)
    for row in (*queue.running, *queue.pending):
        if is_marked(row.items, prompt_id):
            return Search(row.run_id)
    run_ids, is_complete = await _newest_ended(calls)
    for run_id in (run_id for run_id in run_ids if run_id not in others):
        detail = await detail_of(calls, run_id)
        if detail is not None and is_marked(detail, prompt_id):
            return Search(run_id)
    return Search(None, is_complete, others.union(run_ids))


async def _newest_ended(calls: Calls) -> tuple[tuple[str, ...], bool]:
    response = await ask(calls, JOBS)
    with calls.reading(JOBS.operation):
        answer = mapping_in(json_of(JOBS, response), "a list of jobs")
        rows = list_in(answer.get("jobs"), "'jobs'")
        run_ids = tuple(text_at(mapping_in(row, "a job"), "id", "a job") for row in rows)
        return run_ids, not _has_more(answer)


def _has_more(answer: Mapping[str, Any]) -> bool:
    page = mapping_in(answer.get("pagination"), "'pagination'")
    return page.get("has_more") is not False
