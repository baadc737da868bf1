"""What is known of a followed run, and what of it is news. Pure."""

from dataclasses import dataclass, field, replace

from comfyfleet.comfy.events import (
    Cached,
    Cancelled,
    End,
    Event,
    Failed,
    NodeDone,
    NodeStarted,
    Queued,
    Started,
    Succeeded,
)
from comfyfleet.comfy.messages import Message, NodeStates, RunOver, Status, Unknown
from comfyfleet.comfy.places import Absent, Ended, Place, Running, Waiting


@dataclass(frozen=True, slots=True)
class Story:
    """`end` is what was heard; it counts once `over`: then history has the outputs, too."""

    run_id: str
    started: bool = False
    cached: tuple[str, ...] | None = None
    done: frozenset[str] = frozenset()
    end: End | None = None
    over: bool = False
    ahead: int | None = None
    node_id: str | None = None


@dataclass(frozen=True, slots=True)
class Chapter:
    """A story after something was heard or seen, and the events to tell."""

    story: Story
    news: tuple[Event, ...] = field(default=())


def hear(story: Story, message: Message) -> Chapter:
    """After a message of this run."""
    match message:
        case Status() | Unknown() | Queued():
            return Chapter(story)
        case RunOver():
            return Chapter(replace(story, over=True))
        case Succeeded():
            return Chapter(replace(story, end=Succeeded(story.run_id, story.cached or ())))
        case Failed() | Cancelled():
            return Chapter(replace(story, end=message))
        case Started():
            return _start(story)
        case Cached(nodes=nodes):
            begun = _start(story)
            return _also(begun, replace(begun.story, cached=nodes), message)
        case NodeStates(done=done):
            return _finish_nodes(story, done)
        case NodeDone(node_id=node_id):
            begun = _start(story)
            return _also(begun, replace(begun.story, done=begun.story.done | {node_id}), message)
        case NodeStarted(node_id=node_id):
            begun = _start(story)
            # Said again to a socket that has come back.
            news = () if node_id == story.node_id else (message,)
            return _also(begun, replace(begun.story, node_id=node_id), *news)
        case _:
            begun = _start(story)
            return _also(begun, begun.story, message)


def see(story: Story, place: Place) -> Chapter:
    """After a look at queue and history."""
    match place:
        case Waiting(ahead=ahead) if not story.started:
            news = () if ahead == story.ahead else (Queued(story.run_id, ahead),)
            return Chapter(replace(story, ahead=ahead), news)
        case Running():
            return _start(story)
        case Ended(end=end, cached=cached):
            begun = _start(story)
            missed = () if begun.story.cached is not None else (Cached(story.run_id, cached),)
            told = replace(begun.story, end=end, over=True, cached=cached)
            return Chapter(told, (*begun.news, *missed))
        case Waiting() | Absent():
            return Chapter(story)


def _start(story: Story) -> Chapter:
    if story.started:
        return Chapter(story)
    return Chapter(replace(story, started=True), (Started(story.run_id),))


def _also(chapter: Chapter, story: Story, *news: Event) -> Chapter:
    return Chapter(story, (*chapter.news, *news))


def _finish_nodes(story: Story, done: tuple[str, ...]) -> Chapter:
    """A node that shows nothing has no message of its own when it is done."""
    begun = _start(story)
    known = begun.story.done | set(story.cached or ())
    fresh = [node_id for node_id in done if node_id not in known]
    told = replace(begun.story, done=begun.story.done | set(fresh))
    return _also(begun, told, *(NodeDone(story.run_id, node_id) for node_id in fresh))
