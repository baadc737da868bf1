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
from comfyfleet.comfy.messages import Message, NodeStates, RunOver, Status
from comfyfleet.comfy.places import Absent, Ended, Running, Waiting
from comfyfleet.comfy.story import Chapter, Story, hear, see


def after(*messages: Message) -> Chapter:
    def then(chapter: Chapter, message: Message) -> Chapter:
        following = hear(chapter.story, message)
        return Chapter(following.story, (*chapter.news, *following.news))

    return reduce(then, messages, Chapter(Story("p")))


def news(*messages: Message) -> list[Event]:
    return [*after(*messages).news]


def test_a_start_that_was_missed_is_told_before_the_first_node() -> None:
    assert news(NodeStarted("p", "1", "1")) == [Started("p"), NodeStarted("p", "1", "1")]


def test_a_node_that_is_told_again_to_a_new_socket_is_no_news() -> None:
    started = NodeStarted("p", "1", "1")
    assert news(Started("p"), started, started) == [Started("p"), started]


def test_a_node_without_output_is_done_when_its_state_says_so_and_only_once() -> None:
    states = NodeStates("p", ("1",))
    assert news(Started("p"), states, states) == [Started("p"), NodeDone("p", "1")]


def test_a_node_with_output_is_done_once_too() -> None:
    done = NodeDone("p", "1", {"text": ["a"]})
    assert news(Started("p"), done, NodeStates("p", ("1",))) == [Started("p"), done]


def test_cached_nodes_are_not_told_as_done_by_their_state() -> None:
    cached = Cached("p", ("1",))
    assert news(Started("p"), cached, NodeStates("p", ("1",))) == [Started("p"), cached]


def test_the_end_counts_once_the_run_is_over() -> None:
    heard = after(Started("p"), Cached("p", ("1",)), Succeeded("p")).story
    assert (heard.end, heard.over) == (Succeeded("p", reused=("1",)), False)
    assert hear(heard, RunOver("p")).story.over


def test_what_is_not_about_the_run_changes_nothing() -> None:
    assert after(Status(3)) == Chapter(Story("p"))


def test_a_place_in_the_queue_is_told_when_it_changes() -> None:
    first = see(Story("p"), Waiting(None, 2, "other"))
    assert first.news == (Queued("p", 2),)
    assert see(first.story, Waiting(None, 2, "other")).news == ()
    assert see(first.story, Waiting(None, 1, "other")).news == (Queued("p", 1),)


def test_a_run_that_is_seen_at_work_has_started() -> None:
    assert see(Story("p"), Running(None)).news == (Started("p"),)
    assert see(Story("p", started=True), Running(None)).news == ()


def test_an_end_in_history_tells_what_was_missed_before_it() -> None:
    chapter = see(Story("p"), Ended(Cancelled("p"), ("1",), {}))
    assert chapter.news == (Started("p"), Cached("p", ("1",)))
    assert (chapter.story.end, chapter.story.over) == (Cancelled("p"), True)


def test_absence_is_not_a_chapter() -> None:
    assert see(Story("p"), Absent()) == Chapter(Story("p"))
