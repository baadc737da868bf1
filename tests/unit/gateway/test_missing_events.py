"""What a client is told of a run of which nobody heard all."""

from datetime import UTC, datetime

import pytest

from comfyfleet.server.run_log.model import (
    COMPLETED,
    FAILED,
    Event,
    RunEnd,
    missing_events,
    record_from,
    with_one_end,
    without_ends,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MADE = {"images": [{"filename": "a.png", "subfolder": "", "type": "output"}]}
HISTORY = {"outputs": {"9": MADE, "8": MADE}, "meta": {"9": {"display_node": "7"}}, "status": {}}


def test_results_that_only_the_history_of_the_backend_has_are_told_before_the_end() -> None:
    heard: list[Event] = [
        ("execution_start", {"prompt_id": "p"}),
        ("executed", {"node": "8", "output": MADE, "prompt_id": "p"}),
    ]
    told = missing_events("p", RunEnd(COMPLETED), heard, NOW, history=HISTORY)
    assert [kind for kind, _ in told] == ["executed", "execution_success"]
    assert told[0][1] == {"node": "9", "display_node": "7", "output": MADE, "prompt_id": "p"}


def test_a_run_that_failed_gives_nothing_away_and_one_that_was_heard_is_not_told_again() -> None:
    failed = missing_events("p", RunEnd("failed"), [], NOW, history=HISTORY)
    assert [kind for kind, _ in failed] == ["execution_start", "execution_error"]
    whole: list[Event] = [("execution_success", {"prompt_id": "p"})]
    assert missing_events("p", RunEnd(COMPLETED), whole, NOW, history=HISTORY) == []


BLOCKED: Event = ("execution_error", {"node_id": "1", "exception_type": "ExecutionBlocked"})


@pytest.mark.parametrize(
    "end",
    [
        ("execution_success", {"prompt_id": "p"}),
        ("execution_error", {"node_id": "3", "exception_type": "ValueError"}),
    ],
)
def test_a_blocked_node_does_not_hide_how_the_run_ended(end: Event) -> None:
    assert with_one_end([BLOCKED, end, end]) == [BLOCKED, end]
    assert without_ends([BLOCKED, end]) == [BLOCKED]
    assert missing_events("p", RunEnd(FAILED), [BLOCKED, end], NOW) == []
    record = record_from([BLOCKED, end], None, is_success=False)
    assert record["status"]["messages"] == [[*end]]


def test_a_run_with_a_blocked_node_whose_end_nobody_heard_ends() -> None:
    start: Event = ("execution_start", {"prompt_id": "p"})
    told = missing_events("p", RunEnd(COMPLETED), [start, BLOCKED], NOW)
    assert [kind for kind, _ in told] == ["execution_success"]
