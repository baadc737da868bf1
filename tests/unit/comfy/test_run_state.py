from functools import reduce

from comfyfleet.comfy.events import (
    Cached,
    Cancelled,
    Event,
    NodeDone,
    NodeStarted,
    Queued,
    Started,
    Succeeded,
)
from comfyfleet.comfy.follow import RunState, Transition, apply_location, apply_message
from comfyfleet.comfy.messages import Message, NodeStates, QueueStatus, RunOver
from comfyfleet.comfy.run_location import Absent, Executing, InHistory, InQueue


def after(*messages: Message) -> Transition:
    def then(transition: Transition, message: Message) -> Transition:
        following = apply_message(transition.state, message)
        return Transition(following.state, (*transition.events, *following.events))

    return reduce(then, messages, Transition(RunState("p")))


def events(*messages: Message) -> list[Event]:
    return [*after(*messages).events]


def test_a_start_that_was_missed_is_told_before_the_first_node() -> None:
    assert events(NodeStarted("p", "1", "1")) == [Started("p"), NodeStarted("p", "1", "1")]


def test_a_node_that_is_told_again_to_a_new_socket_is_no_news() -> None:
    started = NodeStarted("p", "1", "1")
    assert events(Started("p"), started, started) == [Started("p"), started]


def test_a_node_without_output_is_done_when_its_state_says_so_and_only_once() -> None:
    states = NodeStates("p", ("1",))
    assert events(Started("p"), states, states) == [Started("p"), NodeDone("p", "1")]


def test_a_node_with_output_is_done_once_too() -> None:
    done = NodeDone("p", "1", {"text": ["a"]})
    assert events(Started("p"), done, NodeStates("p", ("1",))) == [Started("p"), done]


def test_cached_nodes_are_not_told_as_done_by_their_state() -> None:
    cached = Cached("p", ("1",))
    assert events(Started("p"), cached, NodeStates("p", ("1",))) == [Started("p"), cached]


def test_the_end_counts_once_the_run_is_over() -> None:
    heard = after(Started("p"), Cached("p", ("1",)), Succeeded("p")).state
    assert (heard.end, heard.over) == (Succeeded("p", reused=("1",)), False)
    assert apply_message(heard, RunOver("p")).state.over


def test_what_is_not_about_the_run_changes_nothing() -> None:
    assert after(QueueStatus(3)) == Transition(RunState("p"))


def test_a_place_in_the_queue_is_told_when_it_changes() -> None:
    first = apply_location(RunState("p"), InQueue(None, 2, "other"))
    assert first.events == (Queued("p", 2),)
    assert apply_location(first.state, InQueue(None, 2, "other")).events == ()
    assert apply_location(first.state, InQueue(None, 1, "other")).events == (Queued("p", 1),)


def test_a_run_that_is_seen_at_work_has_started() -> None:
    assert apply_location(RunState("p"), Executing(None)).events == (Started("p"),)
    assert apply_location(RunState("p", started=True), Executing(None)).events == ()


def test_an_end_in_history_tells_what_was_missed_before_it() -> None:
    transition = apply_location(RunState("p"), InHistory(Cancelled("p"), ("1",), {}))
    assert transition.events == (Started("p"), Cached("p", ("1",)))
    assert (transition.state.end, transition.state.over) == (Cancelled("p"), True)


def test_absence_is_not_a_chapter() -> None:
    assert apply_location(RunState("p"), Absent()) == Transition(RunState("p"))
