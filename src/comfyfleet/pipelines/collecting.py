"""Ended jobs become candidates: one per picture, or per text where there is none; all at once, once."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, TypeAlias
from uuid import UUID, uuid5

from comfyfleet.db import Database, Tx
from comfyfleet.files import service as files
from comfyfleet.files.model import File
from comfyfleet.jobs import service as jobs
from comfyfleet.jobs.model import Job, JobStatus
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import FleetError, NotFound
from comfyfleet.media.kinds import kind_of
from comfyfleet.pipelines import journal
from comfyfleet.pipelines.acting import RUN_KIND
from comfyfleet.pipelines.decide import wanted_of
from comfyfleet.pipelines.model import Candidate, JobState, PipelineJob, StoredPipeline, StoredRun
from comfyfleet.pipelines.naming import candidate_path
from comfyfleet.pipelines.pictures import PICTURE_BYTES_MAX, problem_with_picture
from comfyfleet.pipelines.store import candidates, runs
from comfyfleet.pipelines.store import jobs as job_rows
from comfyfleet.pipelines.watching import pause_if_full, raise_alert
from comfyfleet.wire.values import text_of

log = logging.getLogger(__name__)
WORDS_PER_PASS_MAX = 200
REMARK_CHARACTERS_MAX = 2000
# Candidates, and how the job stands now; None: as it stood before.
Written: TypeAlias = tuple[int, JobState | None]


@dataclass(frozen=True)
class Outcome:
    """What came out of a job, looked at before anything is written."""

    job: Job
    pictures: Mapping[int, File] = field(default_factory=dict)  # by their place among the outputs
    texts: tuple[str, ...] = ()  # candidates themselves, where there is no picture
    remarks: tuple[str, ...] = ()  # on what is no candidate, and why

    @property
    def remark(self) -> str | None:
        return "; ".join(self.remarks)[:REMARK_CHARACTERS_MAX] or None


async def collect_ended(sides: Sides, pool: Database) -> bool:
    """A pass over words of ended jobs, and over jobs whose word was lost. True: there is more."""
    async with pool.look() as tx:
        words = await jobs.words_for_runs(tx, RUN_KIND, now=sides.clock(), limit=WORDS_PER_PASS_MAX)
    for word, tenant_id, run_id, job_id in words:
        await _collect_safely(sides, pool, tenant_id, run_id, job_id, word)
    async with pool.look() as tx:
        unheard = await job_rows.ended_unheard(tx, limit=WORDS_PER_PASS_MAX)
    for each in unheard:
        await _collect_safely(sides, pool, each.tenant_id, each.run_id, each.job_id, None)
    return len(words) == WORDS_PER_PASS_MAX


async def _collect_safely(
    sides: Sides, pool: Database, tenant_id: UUID, run_id: UUID, job_id: UUID, word: int | None
) -> None:
    """One whose files can't be reached now holds up no other; its word stays."""
    try:
        await collect(sides, pool, tenant_id, run_id, job_id, word=word)
    except FleetError as error:
        log.warning("candidates of job %s wait: %s", job_id, error.message)
    except Exception:
        log.exception("candidates of job %s wait", job_id)


async def collect(
    sides: Sides,
    pool: Database,
    tenant_id: UUID,
    run_id: UUID,
    job_id: UUID,
    *,
    word: int | None = None,
) -> int:
    """How many candidates were written; none if they were before."""
    outcome = await _outcome(sides, pool, tenant_id, job_id)
    written: Written = (0, None)
    async with pool.begin() as tx:
        stored = await runs.run(tx, tenant_id, run_id, is_locked=True)
        row = await job_rows.get(tx, run_id, job_id) if stored else None
        if stored and row and outcome and not outcome.job.status.is_active:
            written = await _write(tx, sides, stored, row, outcome)
        if word is not None:
            await jobs.forget_words(tx, [word])
    sides.news.tell(run_id)
    count, state = written
    if state is not None:
        sides.tallies.pipeline_jobs.labels(state).inc()
    return count


async def _outcome(sides: Sides, pool: Database, tenant_id: UUID, job_id: UUID) -> Outcome | None:
    try:
        async with pool.look() as tx:
            job = await jobs.get(tx, tenant_id, job_id)
    except NotFound:
        return None
    if job.status != JobStatus.COMPLETED:
        return Outcome(job)
    pictures: dict[int, File] = {}
    remarks: list[str] = []
    for index, output in enumerate((job.result_metadata or {}).get("outputs", [])):
        file = await _file(pool, tenant_id, UUID(output["file_id"]))
        problem = await _problem(sides, file)
        if file and problem is None:
            pictures[index] = file
        else:
            remarks.append(f"output {output['name']!r}: {problem}")
    texts = () if pictures else _texts(job)
    if not pictures and not texts and not remarks:
        remarks.append("the job saved no picture, and showed no text")
    return Outcome(job, pictures, texts, tuple(remarks))


def _texts(job: Job) -> tuple[str, ...]:
    """Of the first node that showed any."""
    shown = [each for each in job.values if isinstance(each.value, str) and each.value]
    return tuple(each.value for each in shown if each.node_id == shown[0].node_id)


async def _file(pool: Database, tenant_id: UUID, file_id: UUID) -> File | None:
    try:
        async with pool.look() as tx:
            return await files.get(tx, tenant_id, file_id)
    except NotFound:
        return None


async def _problem(sides: Sides, file: File | None) -> str | None:
    if file is None:
        return "its file is gone"
    if kind_of(file.mime_type) in ("video", "audio"):
        return f"it is {file.mime_type}, no picture"
    if (file.size or 0) > PICTURE_BYTES_MAX:
        return f"it is larger than {PICTURE_BYTES_MAX:,} bytes"
    try:
        return problem_with_picture(await sides.store.get(file.path))
    except NotFound:
        return "its object is gone"


async def _write(
    tx: Tx, sides: Sides, stored: StoredRun, row: PipelineJob, outcome: Outcome
) -> Written:
    now = sides.clock()
    made_with = await runs.pipeline(tx, stored.tenant_id, stored.pipeline_id)
    if made_with is None:
        raise NotFound(f"there is no pipeline {stored.pipeline_id}")
    outcome = await _wanted_of(tx, stored, made_with, row, outcome)
    is_done = bool(outcome.pictures or outcome.texts)
    is_paid = outcome.job.status == JobStatus.COMPLETED
    error = outcome.remark if is_paid else outcome.job.error_message or "The job was cancelled."
    state = JobState.DONE if is_done else JobState.FAILED
    if not await job_rows.end(tx, row.id, state, now=now, error=error, is_refunded=not is_paid):
        return 0, None  # written before, or cancelled by us
    await runs.change_run(tx, stored.id, {"look_at": now, "changed_at": now})
    if not is_done:
        told = {"job_id": str(row.id), "step": row.step, "error": error}
        await journal.record(tx, stored, "job_failed", told, now=now)
        await raise_alert(tx, sides, stored, row, error, now=now)
        return 0, state
    made: Mapping[int, File | str] = outcome.pictures or dict(enumerate(outcome.texts))
    rows = [
        _candidate(stored, made_with, row, outcome.job, index, each, now)
        for index, each in made.items()
    ]
    await candidates.add(tx, stored.tenant_id, stored.id, rows)
    if row.parent:
        await candidates.count_children(tx, row.parent, len(rows))
    await journal.record(tx, stored, "candidates", _told(row, rows, error), now=now)
    await pause_if_full(tx, sides, stored, row, now=now)
    return len(rows), state


async def _wanted_of(
    tx: Tx, stored: StoredRun, made_with: StoredPipeline, row: PipelineJob, outcome: Outcome
) -> Outcome:
    """As many as the step said, and as are still wanted: the rest is left out, and that is told."""
    count = len(outcome.pictures) or len(outcome.texts)
    if count <= 1:
        return outcome
    tree = await candidates.tree_of(tx, stored.id)
    siblings = sum(each.step == row.step and each.parent == row.parent for each in tree.values())
    left = wanted_of(made_with.pipeline, stored.run, row.step) - siblings
    most = max(1, min(made_with.pipeline.steps[row.step].images_per_job, left))
    if count <= most:
        return outcome
    remark = f"{count} were made, and {most} kept: images_per_job or what is wanted allows no more"
    return replace(
        outcome,
        pictures=dict(islice(outcome.pictures.items(), most)),
        texts=outcome.texts[:most],
        remarks=(*outcome.remarks, remark),
    )


def _told(row: PipelineJob, rows: list[Candidate], remark: str | None) -> dict[str, Any]:
    return {
        "job_id": str(row.id),
        "step": row.step,
        "parent": str(row.parent) if row.parent else None,
        "candidates": [str(each.id) for each in rows],
        "remark": remark,
    }


def _candidate(
    stored: StoredRun,
    made_with: StoredPipeline,
    row: PipelineJob,
    job: Job,
    index: int,
    made: File | str,
    now: datetime,
) -> Candidate:
    candidate_id = uuid5(row.id, str(index))
    # Of one job, the first output is the oldest.
    created_at = now + timedelta(microseconds=index)
    file = made if isinstance(made, File) else None
    path = candidate_path(
        target_folder=stored.run.target_folder,
        step=made_with.pipeline.steps[row.step].name,
        candidate_id=candidate_id,
        created_at=created_at,
        extension=_suffix(file) if file else ".txt",
    )
    return Candidate(
        id=candidate_id,
        step=row.step,
        created_at=created_at,
        parent=row.parent,
        file={
            "file_id": str(file.id) if file else None,
            "path": path,
            "mime_type": file.mime_type if file else "text/plain",
            "size": (file.size or 0) if file else len(str(made).encode()),
        },
        text=text_of(job.values) if file else str(made),
        seed=row.seed,
        properties=job.asked.properties,
        job_id=row.id,
        output_index=index,
    )


def _suffix(file: File) -> str:
    return PurePosixPath(file.filename).suffix or PurePosixPath(file.path).suffix
