"""What a person sees while a run goes on."""

import io
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from comfyfleet.cli.context import CliContext
from comfyfleet.cli.run_progress import (
    LiveDisplay,
    NodePlan,
    PlainLines,
    RunEstimate,
    advance_estimate,
    begin_estimate,
    event_name,
    event_text,
    render_progress,
)
from comfyfleet.comfy.events import (
    Blocked,
    Event,
    NodeStarted,
    Progress,
    Queued,
    Reconnected,
    Started,
    Succeeded,
)

PLAN = NodePlan({"1": "Load [red]", "2": "Sample", "3": "Save"})


def estimate(*events: tuple[float, Event]) -> RunEstimate:
    made = begin_estimate(PLAN, 0.0)
    for now, event in events:
        made = advance_estimate(made, event, now)
    return made


SAMPLING = estimate(
    (0, Started("r")),
    (0, NodeStarted("r", "1", "1")),
    (2, NodeStarted("r", "2", "2")),
    (7, Progress("r", "2", 5, 20)),
)


def seen(at: RunEstimate, rows: tuple[int, int] | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(render_progress(at, title="flow.json", doing="preparing", rows=rows))
    return [line.rstrip() for line in console.export_text().splitlines()]


def context(err: io.StringIO, *, terminal: bool) -> CliContext:
    console = Console(file=err, force_terminal=terminal, width=100)
    now = datetime(2026, 1, 2, tzinfo=UTC)
    return CliContext(
        io.BytesIO(), io.BytesIO(), console, console, {}, lambda: now, clock=lambda: 7.0
    )


def test_the_whole_run_the_current_node_its_steps_and_the_time_left_are_shown() -> None:
    whole, node = seen(SAMPLING)
    assert whole.startswith("flow.json")
    assert whole.endswith("1 of 3 nodes, 0:07, about 0:17 left")
    assert node.startswith("Sample")
    assert node.endswith("step 5 of 20")


def test_a_batch_shows_its_rows() -> None:
    assert seen(SAMPLING, (3, 9))[0].endswith("row 3 of 9")


def test_who_waits_sees_how_many_are_ahead() -> None:
    assert seen(estimate((4, Queued("r", 2))))[0].endswith("2 ahead in the queue, 0:04")


def test_before_the_start_is_shown_what_is_done() -> None:
    assert seen(estimate())[0].endswith("preparing")


def test_titles_are_no_markup_and_are_cut() -> None:
    at = estimate((0, Started("r")), (0, NodeStarted("r", "1", "1")))
    assert seen(at)[1].startswith("Load [red]")
    long = replace(at, plan=NodePlan({"1": "x" * 80}))
    assert seen(long)[1].split()[0] == "x" * 29 + "…"


def test_of_a_run_without_a_plan_the_time_is_shown() -> None:
    at = advance_estimate(begin_estimate(NodePlan({}), 0.0), Started("r"), 1.0)
    assert seen(replace(at, now=4.0))[0].endswith("0:03")


def test_what_must_not_be_missed_stays_on_the_screen() -> None:
    err = io.StringIO()
    with LiveDisplay(context(err, terminal=True), "flow.json") as display:
        display.row(1, 2, "row")
        display.uploaded(Path("cat.png"), "cat.png")
        display.submitted("r", "there")
        display.report(Blocked("r", "2", "KSampler", "nothing selected"), SAMPLING)
        display.saved(Path("cat.png"), "3")
    assert "Sample is blocked: nothing selected" in err.getvalue()


def test_a_log_gets_a_line_for_each_node_and_few_for_steps() -> None:
    err = io.StringIO()
    with PlainLines(context(err, terminal=False)) as lines:
        at = begin_estimate(PLAN, 0.0)
        events: list[tuple[float, Event]] = [(0, Started("r")), (0, NodeStarted("r", "2", "2"))]
        events += [(second, Progress("r", "2", second, 12)) for second in range(1, 13)]
        for now, event in events:
            at = advance_estimate(at, event, now)
            lines.report(event, at)
    assert err.getvalue().splitlines() == [
        "started",
        "Sample (1 of 3)",
        "Sample: step 5 of 12",
        "Sample: step 10 of 12",
    ]


def test_events_in_words() -> None:
    assert event_text(Queued("r", 2), SAMPLING) == "waiting in the queue, 2 ahead"
    assert event_text(Queued("r", 0), SAMPLING) is None
    assert event_text(Reconnected("r"), SAMPLING) == "the connection was lost and has been restored"
    kept = replace(SAMPLING, reused=frozenset("123"))
    assert event_text(Succeeded("r", ("1", "2", "3")), kept) is not None
    assert event_text(Succeeded("r"), SAMPLING) is None
    assert event_text(Succeeded("r", ("1",)), begin_estimate(NodePlan({}), 0.0)) is None


def test_events_have_the_names_of_their_types() -> None:
    assert event_name(NodeStarted("r", "1", "1")) == "node_started"
