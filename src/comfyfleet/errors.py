"""Our errors, each with a stable code. Only the edges translate them (exit codes, HTTP statuses).

FleetError
 ├─ InvalidInput          the input is invalid; the message names the field, node or file
 │   ├─ InvalidWorkflow   a workflow or prompt document is malformed; the error names the location
 │   ├─ InvalidValue      a value doesn't fit its input
 │   └─ NoWorkflowFound   the file contains no workflow; the message describes its content
 ├─ LimitExceeded         the input is larger, deeper or longer than allowed
 ├─ UnknownNodeTypes      the server lacks node types that the workflow needs
 ├─ NodeFailed            a node of the built-in engine failed
 ├─ Interrupted           the run was cancelled while a node was running
 ├─ ServerUnavailable     an upstream server did not respond, or failed
 ├─ AccessDenied          a server requires a key, or rejected it
 ├─ CreditsExhausted      a cloud account has no credits, or no subscription
 ├─ UnexpectedAnswer      a server's response is malformed; the error usually contains it
 ├─ PromptRefused         a backend refused the prompt, or a part of it; the error lists the problems
 ├─ NotOffered            a backend does not have this feature
 ├─ OutcomeUnknown        a prompt was sent, and it is unknown whether it was accepted
 ├─ RunFailed             a run failed; the error contains the node and its message
 ├─ PersonNeeded          a run needs an action that only a person can take
 ├─ RunLost               a backend no longer knows a run that it had accepted
 ├─ RunStalled            a run made no progress for too long; it may still be running
 ├─ RunTimedOut           a run took longer than allowed; it may still be running
 ├─ CancelUnconfirmed     a cancelled run had not ended before the timeout
 ├─ FileGone              a backend lists an output that it no longer has
 ├─ NotFound              the object doesn't exist, or this key can't see it
 ├─ Conflict              the request conflicts with the current state
 │   ├─ JobEnded          the job completed or failed before it could be cancelled
 │   ├─ WorkerOffline     the worker is known, but currently not registered
 │   └─ LeaseLost         the lease is no longer held; nothing was changed
 ├─ Unauthenticated       the key is missing, wrong or revoked
 ├─ Forbidden             the key is valid, but does not allow this
 ├─ Refused               the request is valid, but currently not possible
 │   ├─ InputUnavailable  the file at a customer's URL can't be fetched
 │   ├─ WorkflowWithdrawn  the workflow exists, but accepts no new jobs
 │   ├─ StorageFull       the tenant's storage quota is used up
 │   ├─ LimitSpent        a trigger has used its tokens for the day
 │   └─ InsufficientTokens  the wallet has fewer tokens than the job costs; nothing was written
 ├─ QueueFull             a limit is reached; the error contains the time until a retry
 │   ├─ TooManyActive     a user has the maximum number of active jobs
 │   ├─ TooManyCalls      a key exceeds its rate limit or its concurrent calls
 │   └─ FleetFull         the fleet has its maximum number of workers
 └─ Unavailable           a part of the service can't be reached, such as a database or the object store
     └─ StoreFull         the object store has no space for more files
"""

import errno
from collections.abc import Mapping
from typing import Any, ClassVar

# These names, their codes and their positions in the tree are public. The functions are internal.
__all__ = [
    "AccessDenied",
    "CancelUnconfirmed",
    "Conflict",
    "CreditsExhausted",
    "FileGone",
    "FleetError",
    "FleetFull",
    "Forbidden",
    "InputUnavailable",
    "InsufficientTokens",
    "Interrupted",
    "InvalidInput",
    "InvalidValue",
    "InvalidWorkflow",
    "JobEnded",
    "LeaseLost",
    "LimitExceeded",
    "LimitSpent",
    "NoWorkflowFound",
    "NodeFailed",
    "NotFound",
    "NotOffered",
    "OutcomeUnknown",
    "OutputMissing",
    "PersonNeeded",
    "PromptRefused",
    "QueueFull",
    "Refused",
    "RunFailed",
    "RunLost",
    "RunStalled",
    "RunTimedOut",
    "ServerUnavailable",
    "StorageFull",
    "StoreFull",
    "TooManyActive",
    "TooManyCalls",
    "Unauthenticated",
    "Unavailable",
    "UnexpectedAnswer",
    "UnknownNodeTypes",
    "WorkerOffline",
    "WorkerRevoked",
    "WorkflowWithdrawn",
]


class FleetError(Exception):
    """The base class of all errors that we raise intentionally."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: Mapping[str, Any] = details


def said_to_customers(error: FleetError) -> str:
    """Returns the message for a customer. Problems of our own machines are only intended for
    operators and the log."""
    if isinstance(error, StoreFull):
        return "the service currently has no space for more files; try again later"
    if isinstance(error, Unavailable):
        part = error.part or "a part of the service"
        return f"{part} can't be reached at the moment; try again soon"
    if isinstance(error, _ABOUT_SERVERS):
        return "this is not available at the moment"
    return error.message


class InvalidInput(FleetError):
    code = "invalid_input"


class InvalidWorkflow(InvalidInput):
    code = "invalid_workflow"


class InvalidValue(InvalidInput):
    code = "invalid_value"


class NoWorkflowFound(InvalidInput):
    code = "no_workflow_found"


class LimitExceeded(FleetError):
    code = "limit_exceeded"


class UnknownNodeTypes(FleetError):
    code = "unknown_node_types"


class NodeFailed(FleetError):
    code = "node_failed"


class Interrupted(FleetError):
    code = "interrupted"


class ServerUnavailable(FleetError):
    code = "server_unavailable"


class AccessDenied(FleetError):
    code = "access_denied"


class CreditsExhausted(FleetError):
    code = "credits_exhausted"


class UnexpectedAnswer(FleetError):
    code = "unexpected_answer"


class PromptRefused(FleetError):
    code = "prompt_refused"


class NotOffered(FleetError):
    code = "not_offered"


class OutcomeUnknown(FleetError):
    code = "outcome_unknown"


class RunFailed(FleetError):
    code = "run_failed"


class PersonNeeded(FleetError):
    code = "person_needed"


class RunLost(FleetError):
    code = "run_lost"


class RunStalled(FleetError):
    code = "run_stalled"


class RunTimedOut(FleetError):
    code = "run_timed_out"


class CancelUnconfirmed(FleetError):
    code = "cancel_unconfirmed"


class FileGone(FleetError):
    code = "file_gone"


class NotFound(FleetError):
    code = "not_found"


class Conflict(FleetError):
    code = "conflict"


class JobEnded(Conflict):
    code = "job_ended"


class WorkerOffline(Conflict):
    code = "worker_offline"


class LeaseLost(Conflict):
    code = "lease_lost"


class Unauthenticated(FleetError):
    code = "unauthenticated"


class WorkerRevoked(Unauthenticated):
    """Raised if the worker must stop, because no other key and no other id will be accepted."""

    code = "worker_revoked"


class Forbidden(FleetError):
    code = "forbidden"


class Refused(FleetError):
    code = "refused"


class WorkflowWithdrawn(Refused):
    """Raised if the workflow exists, but accepts no new jobs."""

    code = "workflow_withdrawn"


class InputUnavailable(Refused):
    code = "input_unavailable"


class OutputMissing(Refused):
    """Raised if a result was reported without a file or a value."""

    code = "output_missing"


class StorageFull(Refused):
    code = "storage_full"


class LimitSpent(Refused):
    code = "limit_spent"


class InsufficientTokens(Refused):
    code = "insufficient_tokens"

    def __init__(
        self,
        message: str = "Insufficient token balance.",
        *,
        required_tokens: int,
        balance: int,
        **details: Any,
    ) -> None:
        super().__init__(message, required_tokens=required_tokens, balance=balance, **details)


class QueueFull(FleetError):
    code = "queue_full"


class TooManyActive(QueueFull):
    code = "too_many_active_jobs"


class FleetFull(QueueFull):
    code = "fleet_full"


class TooManyCalls(QueueFull):
    code = "too_many_calls"


class Unavailable(FleetError):
    code = "unavailable"
    part = ""  # the part that can't be reached, in terms that customers may read; empty if unknown


class StoreFull(Unavailable):
    """Raised if the object store accepts no more bytes. Reads still work."""

    code = "store_full"


# The system's error codes for a full disk or an exhausted disk quota.
_FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_full_disk(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _FULL_DISK


# A note on an error whose outage has already been logged, so that its consequences are only logged
# at DEBUG.
LOGGED = "this outage has already been logged"


def is_logged(error: BaseException) -> bool:
    return LOGGED in getattr(error, "__notes__", ())


# Errors about upstream servers, whose names and responses customers must not see.
_ABOUT_SERVERS = (
    ServerUnavailable,
    AccessDenied,
    CreditsExhausted,
    UnexpectedAnswer,
    PromptRefused,
    OutcomeUnknown,
    RunFailed,
    RunLost,
    RunStalled,
    CancelUnconfirmed,
)


def install_line(extra: str) -> str:
    return f'pip install "comfyfleet[{extra}]"'


def missing_extra(what: str, package: str | None, extra: str) -> InvalidInput:
    """Returns the error for a feature that can't work because `package` is not installed."""
    return InvalidInput(
        f"{what} needs {package or 'a package'}, which is not installed",
        hint=install_line(extra),
    )
