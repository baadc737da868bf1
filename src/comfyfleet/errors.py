"""Our errors, each with a stable code. Only edges translate them (exit codes, HTTP statuses).

FleetError
 ├─ InvalidInput          what was given can't be used; the message names the field, node or file
 │   ├─ InvalidWorkflow   a workflow or prompt document is broken; carries the place
 │   ├─ InvalidValue      a value doesn't fit its input
 │   └─ NoWorkflowFound   the file holds no workflow; says what was found instead
 ├─ LimitExceeded         larger, deeper or longer than we accept
 ├─ UnknownNodeTypes      the server lacks node types that the workflow needs
 ├─ NodeFailed            a node of the built-in engine could not do its work
 ├─ Interrupted           the run was cancelled while a node was at work
 ├─ ServerUnavailable     a server we asked did not answer as one
 ├─ AccessDenied          a server wants a key, or another one
 ├─ CreditsExhausted      an account of a cloud has no credits, or no subscription
 ├─ UnexpectedAnswer      a server answered in a shape that we don't know; carries what was received
 ├─ PromptRefused         a backend will not run the prompt, or not all of it; carries the problems
 ├─ NotOffered            a backend has no such thing, whoever asks
 ├─ OutcomeUnknown        a prompt was sent, and nobody can tell whether it was taken
 ├─ RunFailed             a run ended without success; carries the node and what it said
 ├─ RunLost               a backend no longer knows a run that it had taken
 ├─ RunStalled            a run showed no progress for too long; it may still be going on
 ├─ RunTimedOut           a run took longer than allowed; it may still be going on
 ├─ CancelUnconfirmed     a run was to be cancelled and had not ended when time was up
 ├─ FileGone              a backend names an output that it no longer has
 ├─ NotFound              there is no such thing, or not for the one who asks
 ├─ Conflict              what is asked for contradicts what is
 │   └─ LeaseLost         the lease is no longer held; nothing was changed
 ├─ Unauthenticated       the key is missing, wrong or revoked
 ├─ Forbidden             the key is right, and does not allow this
 ├─ Refused               well-formed, and not possible as things stand
 │   ├─ InputUnavailable  the file at a customer's URL can't be had, or not from there
 │   ├─ StorageFull       the tenant stores as much as it may
 │   └─ InsufficientTokens  the wallet holds less than the job costs; nothing was written
 ├─ QueueFull             a cap is reached; carries when to come again
 │   ├─ TooManyActive     a user has as many active jobs as allowed
 │   ├─ TooManyCalls      a key calls more often, or more at once, than it may
 │   └─ FleetFull         the fleet has as many workers as it may
 └─ Unavailable           a part of ours can't be reached for now: a database, the store"""

from collections.abc import Mapping
from typing import Any, ClassVar

# Public: these names, their codes and their places in the tree. The functions are internal.
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
    "LeaseLost",
    "LimitExceeded",
    "NoWorkflowFound",
    "NodeFailed",
    "NotFound",
    "NotOffered",
    "OutcomeUnknown",
    "PromptRefused",
    "QueueFull",
    "Refused",
    "RunFailed",
    "RunLost",
    "RunStalled",
    "RunTimedOut",
    "ServerUnavailable",
    "StorageFull",
    "TooManyActive",
    "TooManyCalls",
    "Unauthenticated",
    "Unavailable",
    "UnexpectedAnswer",
    "UnknownNodeTypes",
    "WorkerRevoked",
]


class FleetError(Exception):
    """Base of everything that we raise on purpose."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: Mapping[str, Any] = details


def said_to_customers(error: FleetError) -> str:
    """Our words on what was asked for; what ails our own machines is for operators and the log."""
    if isinstance(error, Unavailable):
        return "a part of the service can't be reached for now; come again in a moment"
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


class LeaseLost(Conflict):
    code = "lease_lost"


class Unauthenticated(FleetError):
    code = "unauthenticated"


class WorkerRevoked(Unauthenticated):
    """The worker is to stop: no other key and no other id will let it in."""

    code = "worker_revoked"


class Forbidden(FleetError):
    code = "forbidden"


class Refused(FleetError):
    code = "refused"


class InputUnavailable(Refused):
    code = "input_unavailable"


class StorageFull(Refused):
    code = "storage_full"


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


# Of servers behind us, whose names and answers are not a customer's business.
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
    """The error of a part that can't work because `package` is not installed."""
    return InvalidInput(
        f"{what} needs {package or 'a package'}, which is not installed", hint=install_line(extra)
    )
