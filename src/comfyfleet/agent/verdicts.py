"""What an error means for the job and for the worker. Pure: one table from errors to last words."""

import errno
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from comfyfleet.agent.facts import is_model
from comfyfleet.agent.healing import Fault, Ill, fault_in
from comfyfleet.comfy.events import Failed
from comfyfleet.comfy.refusals import NodeProblem
from comfyfleet.kernel.errors import (
    AccessDenied,
    CreditsExhausted,
    FileGone,
    FleetError,
    InvalidInput,
    LimitExceeded,
    NotFound,
    OutcomeUnknown,
    PromptRefused,
    Refused,
    RunFailed,
    RunLost,
    RunStalled,
    RunTimedOut,
    ServerUnavailable,
    Unavailable,
    UnexpectedAnswer,
)
from comfyfleet.wire.messages import LACKING_MAX, Fail, Job, Lacking, Requeue

DETAIL_CHARACTERS_MAX = 2_000
TRACEBACK_LINES_MAX = 100
PROBLEMS_MAX = 20
NO_SUCH_NODE = re.compile(r"because node (.+) does not exist")
LACKS = Fault("backend_lacks", relists=True)
FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT})

# The worker's surroundings are at fault: the job may well succeed elsewhere.
FAULTS: tuple[tuple[type[Exception], Fault], ...] = (
    (RunLost, Fault("backend_down")),
    (ServerUnavailable, Fault("backend_down", Ill.DOWN)),
    (RunStalled, Fault("backend_fault", Ill.HUNG)),
    # A result was kept from an earlier run whose files are gone.
    (FileGone, Fault("backend_fault", frees=True)),
    (CreditsExhausted, Fault("backend_down", Ill.CLOSED)),
    (AccessDenied, Fault("backend_down", Ill.CLOSED)),
    (UnexpectedAnswer, Fault("backend_fault")),
    (Unavailable, Fault("backend_fault")),
)
# The job itself is at fault, or can't be run a second time.
FAILURES: tuple[tuple[type[Exception], str], ...] = (
    (OutcomeUnknown, "unknown_outcome"),
    (RunTimedOut, "run_limit"),
    (LimitExceeded, "limit_exceeded"),
    (InvalidInput, "invalid_input"),
    (NotFound, "input_gone"),
    (Refused, "refused"),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`word` ends the lease; `fault`, if any, is the backend's; `puzzling` deserves a traceback."""

    word: Fail | Requeue
    fault: Fault | None = None
    puzzling: bool = False


def verdict_on(error: Exception, job: Job) -> Verdict:
    match error:
        case RunFailed():
            return _of_failed_run(error.details.get("failed"), error, job)
        case PromptRefused():
            return _of_refusal(error, job)
        case OSError() if error.errno in FULL_DISK:
            message = "The worker's disk is full."
            return Verdict(
                failing(job, error_of("disk_full", message)), Fault("backend_fault", Ill.DISK_FULL)
            )
        case FleetError():
            return _of_ours(error, job)
    detail = f"{type(error).__name__}: {error}"
    return Verdict(requeueing(job, Fault("backend_fault"), detail), puzzling=True)


def failing(job: Job, error: dict[str, Any]) -> Fail:
    return Fail(dispatch_id=job.dispatch_id, lease_token=job.lease_token, error=error)


def requeueing(job: Job, fault: Fault, detail: str | None, *, code: str | None = None) -> Requeue:
    return Requeue(
        dispatch_id=job.dispatch_id,
        lease_token=job.lease_token,
        reason=fault.reason,
        detail=None if detail is None else detail[:DETAIL_CHARACTERS_MAX],
        code=code,
    )


def error_of(code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"code": code, "exception_type": code, "exception_message": message, **more}


def _of_ours(error: FleetError, job: Job) -> Verdict:
    for kind, fault in FAULTS:
        if isinstance(error, kind):
            return Verdict(requeueing(job, fault, error.message, code=error.code), fault)
    for kind, code in FAILURES:
        if isinstance(error, kind):
            return Verdict(failing(job, error_of(code, error.message)))
    detail = f"{error.code}: {error.message}"
    return Verdict(requeueing(job, Fault("backend_fault"), detail), puzzling=True)


def _of_failed_run(failed: object, error: RunFailed, job: Job) -> Verdict:
    if not isinstance(failed, Failed):
        # Interrupted on the server by somebody else.
        fault: Fault | None = Fault("backend_fault")
    else:
        fault = fault_in(failed.exception_type, failed.message, failed.traceback)
        if fault is None and failed.retryable:
            fault = Fault("backend_fault")
    if fault is not None:
        return Verdict(requeueing(job, fault, error.message), fault)
    return Verdict(failing(job, _told_by(failed)))


def _told_by(failed: object) -> dict[str, Any]:
    """As it came."""
    if not isinstance(failed, Failed):
        raise TypeError("only a failed run tells why")
    return {
        "code": RunFailed.code,
        "exception_type": failed.exception_type,
        "exception_message": failed.message,
        "node_id": failed.node_id,
        "node_type": failed.node_type,
        "traceback": list(failed.traceback[-TRACEBACK_LINES_MAX:]),
    }


def _of_refusal(error: PromptRefused, job: Job) -> Verdict:
    """What this backend lacks, another may have; anything else is the prompt's own fault."""
    lacking = lacking_in(error.details.get("problems") or ())
    if lacking is None:
        return Verdict(failing(job, refusal_of(error)))
    word = requeueing(job, LACKS, error.message, code=PromptRefused.code)
    return Verdict(word.model_copy(update={"lacking": lacking}), LACKS)


def lacking_in(problems: Iterable[object]) -> Lacking | None:
    """Node types and model files that the backend says it doesn't have."""
    found = [each for each in problems if isinstance(each, NodeProblem)]
    types = dict.fromkeys(name for each in found if (name := _missing_type(each)))
    models = dict.fromkeys(
        (f"{each.class_type}.{each.input_name}", str(each.received))
        for each in found
        if each.kind == "value_not_in_list" and is_model(each.received)
    )
    if not types and not models:
        return None
    return Lacking(node_types=tuple(types)[:LACKING_MAX], models=tuple(models)[:LACKING_MAX])


def _missing_type(problem: NodeProblem) -> str | None:
    """Older servers tell it as an invalid prompt, by a sentence."""
    if problem.kind == "missing_node_type" and problem.class_type:
        return problem.class_type
    told = NO_SUCH_NODE.search(problem.message)
    return told[1] if told else None


def refusal_of(error: PromptRefused) -> dict[str, Any]:
    problems = error.details.get("problems") or ()
    found = [each for each in problems if isinstance(each, NodeProblem)]
    first = found[0] if found else None
    return error_of(
        PromptRefused.code,
        error.message,
        node_id=first.node_id if first else None,
        node_type=first.class_type if first else None,
        traceback=[],
        problems=[str(each) for each in found[:PROBLEMS_MAX]],
    )
