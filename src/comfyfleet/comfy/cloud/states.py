"""The raw states of API v1, which its own description does not list."""

from typing import Literal

Phase = Literal["waiting", "running", "succeeded", "failed", "cancelled"]

# Only these end a job. New words appear without notice, and each of them means: still in flight.
ENDS: dict[str, Phase] = {
    "success": "succeeded",
    "error": "failed",
    "non_retryable_error": "failed",
    "lost": "failed",
    "cancelled": "cancelled",
}
# The cloud's own trouble; `non_retryable_error` is the prompt's.
RETRYABLE = frozenset({"error", "lost"})
WAITING = frozenset(
    {
        "submitted",
        "queued_limited",
        "queued_waiting",
        "allocated",
        "preparing",
        "pending_execution",
    }
)


def phase_of(state: str) -> Phase:
    if state in ENDS:
        return ENDS[state]
    return "waiting" if state in WAITING else "running"


def is_end(state: str) -> bool:
    return state in ENDS


def is_retryable(state: str) -> bool:
    return state in RETRYABLE
