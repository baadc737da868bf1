"""Waits for jobs to end, with a bar for people and the reason while nothing moves."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from comfyfleet.cli.admin.client import Control
from comfyfleet.cli.world import World, printable
from comfyfleet.kernel.errors import ServerUnavailable, Unavailable

PAUSE_SECONDS = 0.5
PAUSE_SECONDS_MAX = 5.0
# So that thousands of jobs are not all asked for at each look: the oldest end first.
LOOKED_AT_MAX = 20
ENDED = ("completed", "failed", "cancelled")
AWAY_SECONDS_MAX = 300.0  # that a control plane, or its database, may be gone while one waits


def outlasted(
    look: Callable[[], dict[str, Any]], world: World, what: str, sleep: Callable[[float], None]
) -> dict[str, Any]:
    """The answer, even if nobody can give it for a while: what is waited for doesn't end by that."""
    deadline = world.clock() + AWAY_SECONDS_MAX
    was_told = False
    while True:
        try:
            return look()
        except (ServerUnavailable, Unavailable) as error:
            if world.clock() > deadline:
                raise
            if not was_told:
                world.warn(f"{error.message}; {what}, trying again")
                was_told = True
            sleep(PAUSE_SECONDS)


@dataclass
class Waiting:
    """Looks at the jobs until each has ended."""

    plane: Control
    world: World
    tenant: str | None = None
    sleep: Callable[[float], None] = time.sleep
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)

    def wait(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[now]}"))
        with Progress(
            *columns,
            TimeElapsedColumn(),
            console=self.world.err,
            transient=True,
            disable=not self.world.err.is_terminal,
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
                # Nothing moved: the next look can wait a little longer.
                moved = len(self.ended) > before
                pause = PAUSE_SECONDS if moved else min(pause * 1.2, PAUSE_SECONDS_MAX)
                if len(self.ended) < len(ids):
                    self.sleep(pause)
        return [self.ended[each] for each in ids]

    def _look(self, ids: Sequence[str]) -> tuple[float, str]:
        """Percents done in all, and what the first that is not done does."""
        open_ = [each for each in ids if each not in self.ended][:LOOKED_AT_MAX]
        percents, now = 0.0, ""
        for job_id in open_:
            get = partial(self.plane.get, "jobs", job_id, tenant_id=self.tenant)
            job = outlasted(get, self.world, "jobs go on", self.sleep)
            if job["status"] in ENDED:
                self.ended[job_id] = job
                continue
            percents += (job.get("progress") or {}).get("percent") or 0.0
            now = now or str(job.get("why") or job["status"])
        return len(self.ended) * 100 + percents, now
