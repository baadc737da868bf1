"""Waits for jobs until all have ended, even while the control plane is unavailable. Also provides a
display that updates in place on a terminal, and is printed once elsewhere."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from comfyfleet.api.jobs import ENDED
from comfyfleet.cli.context import CliContext, printable
from comfyfleet.cli.control_plane import ApiSession
from comfyfleet.errors import FleetError, PersonNeeded, ServerUnavailable, Unavailable

REFRESHES_PER_SECOND = 4
T = TypeVar("T")


class UpdatableDisplay(Protocol):
    def update(self, renderable: RenderableType) -> None: ...


class _FinalDisplay:
    """Stores the last content of the display."""

    def __init__(self, shown: RenderableType | None) -> None:
        self.shown = shown

    def update(self, renderable: RenderableType) -> None:
        self.shown = renderable


@contextmanager
def live_display(
    console: Console, first: RenderableType | None = None
) -> Iterator[UpdatableDisplay]:
    if console.is_terminal:
        with Live(first, console=console, refresh_per_second=REFRESHES_PER_SECOND) as live:
            yield live
        return
    last = _FinalDisplay(first)
    try:
        yield last
    finally:
        if last.shown is not None:
            console.print(last.shown, soft_wrap=True)


PAUSE_SECONDS = 0.5
PAUSE_SECONDS_MAX = 5.0
# Maximum number of jobs polled at a time, so that waiting for thousands of jobs causes few
# requests. The oldest jobs are polled first, because they usually end first.
POLLED_JOBS_MAX = 20
# how long a control plane or its database may be unavailable during a wait
AWAY_SECONDS_MAX = 300.0


def retry_while_away(
    look: Callable[[], T],
    context: CliContext,
    what: str,
    sleep: Callable[[float], None],
) -> T:
    """Polls until the control plane responds. Short outages don't end the wait."""
    deadline = context.clock() + AWAY_SECONDS_MAX
    was_told = False
    while True:
        try:
            return look()
        except (ServerUnavailable, Unavailable) as error:
            if context.clock() > deadline:
                raise
            if not was_told:
                context.warn(f"{error.message}; {what}, retrying")
                was_told = True
            sleep(PAUSE_SECONDS)


# Instructions for errors that end a wait immediately.
_REMEDIES = {
    "insufficient_tokens": "Add tokens to the wallet, then try again.",
    "workflow_withdrawn": "Ask the operator to offer the workflow again, or use another one.",
}


@contextmanager
def person_needed_if_refused(*, waits: bool) -> Iterator[None]:
    """Replaces errors that only a person can resolve with PersonNeeded, for commands that wait."""
    try:
        yield
    except FleetError as error:
        remedy = _REMEDIES.get(error.code)
        if not waits or remedy is None:
            raise
        raise PersonNeeded(f"{error.message.rstrip('.')}. {remedy}") from error


@dataclass
class JobWaiter:
    """Polls jobs until all have ended."""

    plane: ApiSession
    context: CliContext
    tenant: str | None = None
    sleep: Callable[[float], None] = time.sleep
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)
    _stuck_since: dict[str, float] = field(default_factory=dict)

    def wait(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[now]}"))
        with Progress(
            *columns,
            TimeElapsedColumn(),
            console=self.context.err,
            transient=True,
            disable=not self.context.err.is_terminal,
        ) as bar:
            line = bar.add_task("", total=len(ids) * 100, now="")
            pause = PAUSE_SECONDS
            while len(self.ended) < len(ids):
                before = len(self.ended)
                done, now = self._look(ids)
                bar.update(
                    line,
                    completed=done,
                    description=f"{len(self.ended)} of {len(ids)}",
                    now=printable(now),
                )
                # Without progress, the next poll can wait a little longer.
                moved = len(self.ended) > before
                pause = PAUSE_SECONDS if moved else min(pause * 1.2, PAUSE_SECONDS_MAX)
                if len(self.ended) < len(ids):
                    self.sleep(pause)
        return [self.ended[job_id] for job_id in ids]

    def _look(self, ids: Sequence[str]) -> tuple[float, str]:
        """Returns the total percentage, and the current state of the first unfinished job."""
        open_ = [job_id for job_id in ids if job_id not in self.ended][:POLLED_JOBS_MAX]
        percents, now = 0.0, ""
        helpless: list[dict[str, Any]] = []
        for job_id in open_:
            get = partial(self.plane.get, "jobs", job_id, tenant_id=self.tenant)
            job = retry_while_away(get, self.context, "the jobs continue", self.sleep)
            if job["status"] in ENDED:
                self.ended[job_id] = job
                continue
            if self._needs_person(job):
                helpless.append(job)
            percents += (job.get("progress") or {}).get("percent") or 0.0
            now = now or str(job.get("why") or job["status"])
        if open_ and len(helpless) == len(open_):
            first = helpless[0]
            raise PersonNeeded(
                f"job {first['id']} can't run: {first['why']} {first['required_action']}",
                hint=f"Show it with: comfyfleet admin jobs show {first['id']}",
            )
        return len(self.ended) * 100 + percents, now

    def _needs_person(self, job: dict[str, Any]) -> bool:
        """Checks whether the job has been without a suitable worker for as long as the control
        plane allows."""
        seconds = job.get("person_needed_after")
        if seconds is None:
            self._stuck_since.pop(job["id"], None)
            return False
        now = self.context.clock()
        return now - self._stuck_since.setdefault(job["id"], now) >= float(seconds)
