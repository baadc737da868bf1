"""A lease in this process: its work and its heartbeats, until its last word is heard."""

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from comfyfleet.agent.beating import Heart
from comfyfleet.agent.control import WORDS, Control, LastWord
from comfyfleet.agent.healing import Fault, Ill
from comfyfleet.agent.lease import Lease, Phase, Workshop, run_lease
from comfyfleet.agent.verdicts import Verdict, error_of, failing, verdict_on
from comfyfleet.comfy.backend import Cancellation
from comfyfleet.kernel.errors import (
    CancelUnconfirmed,
    FleetError,
    LeaseLost,
    PromptRefused,
    Refused,
    RunLost,
    ServerUnavailable,
)
from comfyfleet.wire.messages import Complete, Fail, Requeue, RequeueReason

logger = logging.getLogger(__name__)

# A last word that was not heard for so long is noted, to be said by the worker that comes after us.
UNHEARD_SECONDS = 0.5
# After these the backend has no such prompt, or can't be asked.
NOTHING_TO_CANCEL = (PromptRefused, RunLost, ServerUnavailable)


class Halt(StrEnum):
    """Why work on a lease stops before its end."""

    LOST = "lost"
    CANCELLED = "cancelled"
    RECALL = "recall"
    DRAIN = "drain"
    SPOT = "spot"
    REBALANCE = "rebalance"
    SHUTDOWN = "shutdown"


REASONS: Mapping[Halt, RequeueReason] = {
    Halt.RECALL: "recall",
    Halt.DRAIN: "drain",
    Halt.SPOT: "spot",
    Halt.REBALANCE: "rebalance",
    Halt.SHUTDOWN: "shutdown",
}


class Holding:
    """`ailing` is told of each fault of the backend that came to light; `say` says the last word."""

    def __init__(
        self,
        lease: Lease,
        control: Control,
        workshop: Workshop,
        make_heart: Callable[["Holding"], Heart],
        ailing: Callable[[Fault, str], None],
        say: Callable[[LastWord], Awaitable[object]] | None = None,
    ) -> None:
        self.lease = lease
        self.halted: Halt | None = None
        self._say_it = say or control.end
        self._workshop = workshop
        self._heart = make_heart(self)
        self._ailing = ailing
        self._work: asyncio.Task[Complete] | None = None
        # Made when there is something to put into it.
        self._scratch = (
            workshop.journal.scratch / f"{lease.job.dispatch_id}-{lease.job.lease_token}"
        )

    def halt(self, why: Halt) -> None:
        """The first reason counts, except that a lost lease has nothing more to say."""
        if self.halted is None or why is Halt.LOST:
            self.halted = why
        if self._work is not None:
            self._work.cancel()

    async def hold(self) -> None:
        """Returns when the control plane has heard how it ended, or no longer wants to."""
        lease = self.lease
        word = lease.entry.word
        if word is None:
            word = self._with_prompt(await self._worked())
        lease.enter(Phase.DELIVERING)
        if word is not None:
            lease.entry = replace(lease.entry, word=word)
            await self._say_or_note(word)
        await asyncio.to_thread(self._forget)

    async def _say_or_note(self, word: LastWord) -> None:
        """Most words are heard at once, and then need no note: one that was lost with us before is
        found again, as its run is in the journal."""
        saying = asyncio.create_task(self._say(word))
        try:
            await asyncio.wait({saying}, timeout=UNHEARD_SECONDS)
            if not saying.done():
                await asyncio.to_thread(self._workshop.journal.write, self.lease.entry)
            await saying
        except asyncio.CancelledError:
            saying.cancel()
            self._workshop.journal.write(self.lease.entry)
            raise

    def _with_prompt(self, word: LastWord | None) -> LastWord | None:
        """A run may end before a heartbeat has told what was sent."""
        if isinstance(word, Complete | Fail) and self._heart.untold is not None:
            return word.model_copy(update={"filled_in": self._heart.untold})
        return word

    def _forget(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)
        if self._workshop.files is not None:
            self._workshop.files.remove(self.lease.folder)
        self._workshop.journal.forget(self.lease.job)

    async def _worked(self) -> LastWord | None:
        speaking = [
            asyncio.create_task(self._heart.beat()),
            asyncio.create_task(self._heart.listen()),
        ]
        try:
            return await self._outcome(self._scratch)
        finally:
            for each in speaking:
                each.cancel()

    async def _outcome(self, folder: Path) -> LastWord | None:
        work = asyncio.create_task(run_lease(self.lease, self._heart, self._workshop, folder))
        self._work = work
        if self.halted is not None:
            work.cancel()
        try:
            await asyncio.wait({work})
        finally:
            work.cancel()
        if self.halted is not None and (work.cancelled() or work.exception() is not None):
            return await self._stopped(self.halted)
        error = work.exception()
        if error is None:
            return work.result()
        if isinstance(error, LeaseLost):
            return await self._stopped(Halt.LOST)
        if not isinstance(error, Exception):
            raise error
        return await self._failed(error)

    async def _stopped(self, why: Halt) -> LastWord | None:
        job = self.lease.job
        logger.info("a lease is given up", extra={**self.ids, "reason": why.value})
        if self.lease.in_backend:
            await self._withdraw()
        match why:
            case Halt.LOST:
                return None
            case Halt.CANCELLED:
                return failing(job, error_of("cancelled", "The job was cancelled."))
        return Requeue(
            dispatch_id=job.dispatch_id, lease_token=job.lease_token, reason=REASONS[why]
        )

    async def _failed(self, error: Exception) -> LastWord:
        verdict = verdict_on(error, self.lease.job)
        self._log(error, verdict)
        if self.lease.in_backend and not isinstance(error, NOTHING_TO_CANCEL):
            await self._withdraw()
        if verdict.fault is not None:
            self._ailing(verdict.fault, str(error))
        return verdict.word

    async def _withdraw(self) -> None:
        """Its prompt must not run on for nobody, still less beside a second run of the job."""
        lease, backend = self.lease, self._workshop.backend
        try:
            run_id = lease.entry.run_id
            if run_id is None:
                found = await backend.adopt(lease.prompt_id)
                run_id = lease.prompt_id if found is None else found.run_id
            outcome = await backend.cancel(run_id)
        except CancelUnconfirmed as error:
            self._ailing(Fault("backend_fault", Ill.HUNG), error.message)
        except FleetError as error:
            extra = {**self.ids, "reason": error.message}
            logger.warning("whether its prompt was cancelled is not certain", extra=extra)
        else:
            if outcome is Cancellation.CANCELLED:
                logger.info("its prompt was cancelled", extra=self.ids)

    async def _say(self, word: LastWord) -> None:
        extra = {**self.ids, "word": WORDS[type(word)]}
        try:
            await self._say_it(word)
        except LeaseLost:
            # A control plane may end what it has cancelled without waiting for us.
            expected = self.halted is Halt.CANCELLED
            level = logging.INFO if expected else logging.WARNING
            logger.log(level, "the lease had ended before its last word", extra=extra)
        except Refused as error:
            logger.error("a last word was refused", extra={**extra, "reason": error.message})  # noqa: TRY400
            if isinstance(word, Complete):
                await self._say(failing(self.lease.job, error_of("refused", error.message)))
        else:
            logger.info("a lease has ended", extra=extra)

    def _log(self, error: Exception, verdict: Verdict) -> None:
        word = verdict.word
        reason = word.reason if isinstance(word, Requeue) else "fail"
        extra = {**self.ids, "verdict": reason, "error": str(error)[:2000]}
        logger.warning(
            "a job did not succeed", extra=extra, exc_info=error if verdict.puzzling else None
        )

    @property
    def ids(self) -> dict[str, object]:
        job = self.lease.job
        return {
            "dispatch_id": job.dispatch_id,
            "job_id": str(job.job_id),
            "workflow": job.workflow_slug,
            "prompt_id": self.lease.prompt_id,
        }
