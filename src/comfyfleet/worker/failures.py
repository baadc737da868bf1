"""Maps errors to their consequences for the job, the worker and its backend.

The functions are pure: they map errors and their texts to final reports.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from comfyfleet.api.worker import LACKING_MAX, Fail, Job, Lacking, Requeue, RequeueReason
from comfyfleet.comfy.answers import NodeProblem
from comfyfleet.comfy.events import Failed
from comfyfleet.comfy.messages import system_texts
from comfyfleet.errors import (
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
    is_full_disk,
)
from comfyfleet.worker.backend_facts import is_model_file

TEXT_CHARACTERS_MAX = 20_000


class BackendCondition(StrEnum):
    """A problem of a worker's backend, and when it ends."""

    DOWN = "down"  # The backend doesn't respond. This ends when it responds again.
    # The backend responds, but its prompt thread is stuck. This ends with a restart or when the
    # queue is empty.
    HUNG = "hung"
    POISONED = "poisoned"  # Every prompt fails until the backend is restarted.
    CLOSED = "closed"  # The account has no access or credits. It is checked again later.
    DISK_FULL = "disk_full"  # The disk is full. This ends when it has free space again.
    GROWN = "grown"  # The backend doesn't free memory on request. This ends with a restart.


class BackendFault(NamedTuple):
    """A fault of the backend.

    `frees` means that unloading models and cached results helps. `changes_lists` means that the
    backend's lists of nodes or files have changed.
    """

    reason: RequeueReason
    condition: BackendCondition | None = None
    frees: bool = False
    changes_lists: bool = False


OUT_OF_MEMORY = BackendFault("out_of_memory", frees=True)
POISONED = BackendFault("backend_fault", BackendCondition.POISONED)
DISK_FULL = BackendFault("disk_full", BackendCondition.DISK_FULL)
DISK_FULL_TEXT = "The worker's disk is full."

# The fault to report if the backend's own writes fail. It doesn't pause the worker, because the
# backend may use another disk. If the worker's own disk is full, its writes raise OSError.
BACKEND_DISK_FULL = BackendFault("disk_full")

# Faults by exception type and by system message. The first match counts. An entry matches the end
# of the type's name or the beginning of the message.
_BY_TYPE: tuple[tuple[str, BackendFault], ...] = (
    ("OutOfMemoryError", OUT_OF_MEMORY),
    ("OOM_EXCEPTION", OUT_OF_MEMORY),
    ("MemoryError", OUT_OF_MEMORY),
    ("AcceleratorError", POISONED),
)
_BY_TEXT: tuple[tuple[str, BackendFault], ...] = (
    (r"(CUDA )?out of memory", OUT_OF_MEMORY),
    (r"(HIP|MPS backend|XPU) out of memory", OUT_OF_MEMORY),
    (r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED", OUT_OF_MEMORY),
    (r"Allocation on device\b", OUT_OF_MEMORY),
    (r"DefaultCPUAllocator: (can't allocate|not enough) memory", OUT_OF_MEMORY),
    (r"(\[Errno 12\] )?Cannot allocate memory", OUT_OF_MEMORY),
    (r"unable to mmap \d+ bytes from file .*: Cannot allocate memory", OUT_OF_MEMORY),
    (r"CUDA error: |HIP error: |CUDA driver error: ", POISONED),
    (r"cudaError[A-Z]\w+|CUDA_ERROR_[A-Z_]+", POISONED),
    (r"device-side assert|illegal memory access|unspecified launch failure", POISONED),
    (r"CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED|ARCH_MISMATCH)", POISONED),
    (r"CUDNN_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED)", POISONED),
    (r"\[Errno 28\]|No space left on device", BACKEND_DISK_FULL),
    (
        r"no CUDA-capable device|Found no NVIDIA driver|(The )?GPU (is lost|has fallen off the bus)",
        POISONED,
    ),
)
_TEXTS = tuple((re.compile(pattern, re.IGNORECASE), fault) for pattern, fault in _BY_TEXT)


def find_backend_fault(exception_type: str | None, message: str) -> BackendFault | None:
    """Returns the backend fault that caused an error, or None if the prompt is or may be at fault.

    Only system messages count, so that text quoted by a node can't take a backend out of service.
    """
    for ending, fault in _BY_TYPE:
        if (exception_type or "").endswith(ending):
            return fault
    texts = system_texts(exception_type, message[:TEXT_CHARACTERS_MAX])
    for pattern, fault in _TEXTS:
        if any(pattern.match(text) for text in texts):
            return fault
    return None


DETAIL_CHARACTERS_MAX = 2_000
# Maximum length of a failed run's error message. The control plane stores no more of a report.
FAILURE_CHARACTERS_MAX = 50_000
TRACEBACK_LINES_MAX, TRACEBACK_LINE_CHARACTERS_MAX = 100, 2_000
PROBLEMS_MAX = 20
PROBLEM_CHARACTERS_MAX = 500
REFUSAL_MESSAGE_CHARACTERS_MAX = 5_000
# Maximum length of the backend's response in a report. The control plane stores at most 50,000
# characters of a report.
REFUSAL_CHARACTERS_MAX = 30_000
INVALID_PROMPT = "invalid_prompt"
NO_SUCH_NODE = re.compile(r"because node (.+) does not exist")
BACKEND_LACKS = BackendFault("backend_lacks", changes_lists=True)

# Errors caused by the worker's environment. The job may succeed on another worker.
FAULTS: tuple[tuple[type[Exception], BackendFault], ...] = (
    (RunLost, BackendFault("backend_down")),
    (ServerUnavailable, BackendFault("backend_down", BackendCondition.DOWN)),
    (RunStalled, BackendFault("backend_fault", BackendCondition.HUNG)),
    # ComfyUI cached a result of an earlier run whose files have been deleted.
    (FileGone, BackendFault("backend_fault", frees=True)),
    (CreditsExhausted, BackendFault("backend_down", BackendCondition.CLOSED)),
    (AccessDenied, BackendFault("backend_down", BackendCondition.CLOSED)),
    (UnexpectedAnswer, BackendFault("backend_fault")),
    (Unavailable, BackendFault("backend_fault")),
)
# Errors that fail the job, because the job itself is at fault or must not run twice.
FAILURES: tuple[tuple[type[Exception], str], ...] = (
    (OutcomeUnknown, "unknown_outcome"),
    (RunTimedOut, "run_limit"),
    (LimitExceeded, "limit_exceeded"),
    (InvalidInput, "invalid_input"),
    (NotFound, "input_gone"),
    (Refused, "refused"),
)


@dataclass(frozen=True, slots=True)
class LeaseOutcome:
    """The consequences of an error. `report` ends the lease, `fault` is the backend's fault, if
    any, and `is_unexpected` logs a traceback."""

    report: Fail | Requeue
    fault: BackendFault | None = None
    is_unexpected: bool = False


def outcome_of_error(error: Exception, job: Job) -> LeaseOutcome:
    match error:
        case RunFailed():
            return _outcome_of_failed_run(error.details.get("failed"), error, job)
        case PromptRefused():
            return _outcome_of_refusal(error, job)
        case OSError() if is_full_disk(error):
            return LeaseOutcome(requeued_outcome(job, DISK_FULL, DISK_FULL_TEXT), DISK_FULL)
        case FleetError():
            return _outcome_of_known_error(error, job)
    detail = f"{type(error).__name__}: {error}"
    return LeaseOutcome(
        requeued_outcome(job, BackendFault("backend_fault"), detail), is_unexpected=True
    )


def failed_outcome(job: Job, error: dict[str, Any]) -> Fail:
    return Fail(dispatch_id=job.dispatch_id, lease_token=job.lease_token, error=error)


def requeued_outcome(
    job: Job, fault: BackendFault, detail: str | None, *, code: str | None = None
) -> Requeue:
    return Requeue(
        dispatch_id=job.dispatch_id,
        lease_token=job.lease_token,
        reason=fault.reason,
        detail=None if detail is None else detail[:DETAIL_CHARACTERS_MAX],
        code=code,
    )


def job_error(code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"code": code, "exception_type": code, "exception_message": message, **more}


def _outcome_of_known_error(error: FleetError, job: Job) -> LeaseOutcome:
    for kind, fault in FAULTS:
        if isinstance(error, kind):
            return LeaseOutcome(requeued_outcome(job, fault, error.message, code=error.code), fault)
    for kind, code in FAILURES:
        if isinstance(error, kind):
            return LeaseOutcome(failed_outcome(job, job_error(code, error.message)))
    detail = f"{error.code}: {error.message}"
    return LeaseOutcome(
        requeued_outcome(job, BackendFault("backend_fault"), detail), is_unexpected=True
    )


def _outcome_of_failed_run(failed: object, error: RunFailed, job: Job) -> LeaseOutcome:
    if not isinstance(failed, Failed):
        # The run has no error, so another client interrupted it on the server.
        fault: BackendFault | None = BackendFault("backend_fault")
    else:
        fault = find_backend_fault(failed.exception_type, failed.message)
        if fault is None and failed.retryable:
            fault = BackendFault("backend_fault")
    if fault is not None:
        return LeaseOutcome(requeued_outcome(job, fault, error.message), fault)
    return LeaseOutcome(failed_outcome(job, _failure_details(failed)))


def _failure_details(failed: object) -> dict[str, Any]:
    """Returns the details of a failed run as the backend sent them."""
    if not isinstance(failed, Failed):
        raise TypeError("only a failed run has failure details")
    return {
        "code": RunFailed.code,
        "exception_type": failed.exception_type,
        "exception_message": failed.message[:FAILURE_CHARACTERS_MAX],
        "node_id": failed.node_id,
        "node_type": failed.node_type,
        "traceback": [
            line[:TRACEBACK_LINE_CHARACTERS_MAX] for line in failed.traceback[-TRACEBACK_LINES_MAX:]
        ],
    }


def _outcome_of_refusal(error: PromptRefused, job: Job) -> LeaseOutcome:
    """Returns the outcome of a refused prompt. The job is requeued if this backend lacks a node
    type or model, because another backend may be able to run it. Otherwise, the job fails."""
    lacking = find_missing(error.details.get("problems") or ())
    if lacking is None:
        return LeaseOutcome(failed_outcome(job, refusal_details(error)))
    report = requeued_outcome(job, BACKEND_LACKS, error.message, code=PromptRefused.code)
    return LeaseOutcome(report.model_copy(update={"lacking": lacking}), BACKEND_LACKS)


def find_missing(problems: Iterable[object]) -> Lacking | None:
    """Returns the node types and model files that the backend reports as missing."""
    node_problems = [problem for problem in problems if isinstance(problem, NodeProblem)]
    types = dict.fromkeys(name for problem in node_problems if (name := _missing_type(problem)))
    models = dict.fromkeys(
        (f"{problem.class_type}.{problem.input_name}", str(problem.received))
        for problem in node_problems
        if problem.kind == "value_not_in_list" and is_model_file(problem.received)
    )
    if not types and not models:
        return None
    return Lacking(node_types=tuple(types)[:LACKING_MAX], models=tuple(models)[:LACKING_MAX])


def _missing_type(problem: NodeProblem) -> str | None:
    """Returns the node type that a problem reports as missing, or None.

    Older servers report it as an invalid prompt and name the type only in the message.
    """
    if problem.kind == "missing_node_type" and problem.class_type:
        return problem.class_type
    # Only this kind is searched. The messages of others may contain any text from a custom node's
    # own validation.
    match = NO_SUCH_NODE.search(problem.message) if problem.kind == INVALID_PROMPT else None
    return match[1] if match else None


def refusal_details(error: PromptRefused) -> dict[str, Any]:
    details = error.details.get("problems") or ()
    problems = [problem for problem in details if isinstance(problem, NodeProblem)]
    first = problems[0] if problems else None
    return job_error(
        PromptRefused.code,
        error.message[:REFUSAL_MESSAGE_CHARACTERS_MAX],
        node_id=first.node_id if first else None,
        node_type=first.class_type if first else None,
        traceback=[],
        problems=[str(problem)[:PROBLEM_CHARACTERS_MAX] for problem in problems[:PROBLEMS_MAX]],
        **_refusal(error.details),
    )


def _refusal(details: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the backend's own response, which contains the reason for the client.

    If the response is too large, it is sent without `extra_info`, which lists allowed values.
    """
    error, node_errors = details.get("error"), details.get("node_errors")
    if not isinstance(error, dict) or not isinstance(node_errors, dict):
        return {}
    brief = {
        node_id: {**entry, "errors": [{**item, "extra_info": {}} for item in entry["errors"]]}
        for node_id, entry in node_errors.items()
    }
    refusals = ({"error": error, "node_errors": errors} for errors in (node_errors, brief))
    fitting = (
        refusal for refusal in refusals if len(json.dumps(refusal)) <= REFUSAL_CHARACTERS_MAX
    )
    return {"refusal": refusal} if (refusal := next(fitting, None)) else {}
