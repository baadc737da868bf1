"""How far a run is, from its events and a clock that is set by hand."""

import pytest

from comfyfleet.cli.run_progress import (
    NodePlan,
    RunEstimate,
    advance_estimate,
    begin_estimate,
    clock_time,
    plan_run,
)
from comfyfleet.comfy.events import (
    Cached,
    Event,
    NodeDone,
    NodeStarted,
    Progress,
    Queued,
    Started,
    Succeeded,
)

FOUR = NodePlan({"1": "Load", "2": "Sample", "3": "Decode", "4": "Save"})
INFO = {"Save": {"output_node": True}, "Load": {}, "Show": {"output_node": False}}


def after(*events: tuple[float, Event], plan: NodePlan = FOUR) -> RunEstimate:
    estimate = begin_estimate(plan, 0.0)
    for now, event in events:
        estimate = advance_estimate(estimate, event, now)
    return estimate


def started(node_id: str) -> NodeStarted:
    return NodeStarted("r", node_id, node_id)


def test_a_waiting_run_has_not_begun() -> None:
    estimate = after((1, Queued("r", 3)))
    assert (estimate.ahead, estimate.fraction, estimate.seconds_left) == (3, 0.0, None)


def test_every_node_counts_alike_and_the_current_one_by_its_steps() -> None:
    estimate = after(
        (0, Started("r")), (0, started("1")), (1, started("2")), (3, Progress("r", "2", 5, 10))
    )
    assert estimate.fraction == (1 + 0.5) / 4


def test_the_rest_is_estimated_from_steps_and_from_the_nodes_before() -> None:
    estimate = after(
        (0, Started("r")), (0, started("1")), (1, started("2")), (3, Progress("r", "2", 5, 10))
    )
    # Two more seconds of steps, then two nodes of a second each.
    assert estimate.seconds_left == pytest.approx(2 + 2 * 1)


def test_while_no_node_has_ended_the_steps_alone_count() -> None:
    estimate = after((0, Started("r")), (0, started("1")), (1, Progress("r", "1", 1, 4)))
    assert estimate.seconds_left == pytest.approx(3)


def test_nothing_is_estimated_from_nothing() -> None:
    assert after((0, Started("r")), (0, started("1"))).seconds_left is None
    assert after((0, Started("r"))).seconds_left is None


def test_cached_nodes_are_done_and_tell_nothing_about_the_pace() -> None:
    estimate = after(
        (0, Started("r")), (0, Cached("r", ("1", "2"))), (0, started("3")), (4, started("4"))
    )
    assert estimate.fraction == 3 / 4
    assert estimate.seconds_left == pytest.approx(4)


def test_a_node_that_was_told_as_done_counts_once() -> None:
    estimate = after(
        (0, Started("r")), (0, started("1")), (1, NodeDone("r", "1")), (1, started("2"))
    )
    assert estimate.done == {"1"}


def test_a_node_made_by_another_does_not_count() -> None:
    estimate = after((0, Started("r")), (0, started("9.0.1")), (1, NodeDone("r", "9.0.1")))
    assert estimate.fraction == 0
    assert estimate.plan.name("9.0.1") == "node 9.0.1"


def test_steps_belong_to_their_node() -> None:
    estimate = after((0, Started("r")), (0, Progress("r", "1", 9, 10)), (1, started("2")))
    assert (estimate.steps_done, estimate.steps_total) == (0, 0)
    assert estimate.done == {"1"}


def test_a_success_is_the_whole() -> None:
    estimate = after((0, Started("r")), (2, Succeeded("r")))
    assert (estimate.fraction, estimate.seconds_left, estimate.seconds) == (1.0, None, 2)


def test_of_a_run_without_a_plan_nothing_is_known() -> None:
    estimate = after((0, Started("r")), (1, started("2")), plan=NodePlan({}))
    assert (estimate.fraction, estimate.seconds_left) == (None, None)


def test_only_what_output_nodes_need_is_planned() -> None:
    prompt = {
        "1": {"class_type": "Load", "inputs": {}, "_meta": {"title": "My cat"}},
        "2": {"class_type": "Save", "inputs": {"images": ["1", 0], "other": ["7", 0]}},
        "3": {"class_type": "Show", "inputs": {"images": ["1", 0]}},
    }
    assert plan_run(prompt, INFO).names == {"1": "My cat", "2": "Save"}


def test_a_circle_of_links_is_walked_once() -> None:
    prompt = {
        "1": {"class_type": "Save", "inputs": {"a": ["2", 0]}},
        "2": {"class_type": "Load", "inputs": {"a": ["1", 0]}},
    }
    assert plan_run(prompt, INFO).names.keys() == {"1", "2"}


@pytest.mark.parametrize(
    ("seconds", "shown"), [(-1, "0:00"), (7, "0:07"), (59.6, "1:00"), (3723, "1:02:03")]
)
def test_times_are_shown_as_on_a_clock(seconds: float, shown: str) -> None:
    assert clock_time(seconds) == shown
