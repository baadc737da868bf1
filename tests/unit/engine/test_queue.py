"""Smaller numbers first, front is a stack, and nothing can be interrupted by mistake."""

import pytest

from comfyfleet.engine.queue import PromptQueue, as_comfyui_compares
from comfyfleet.protocol.payloads import QueuedPrompt


def item(prompt_id: str, number: float = 0) -> QueuedPrompt:
    return QueuedPrompt(number, prompt_id, {"1": {}}, {"create_time": number}, ("1",))


@pytest.fixture
def told() -> list[int]:
    return []


@pytest.fixture
def queue(told: list[int]) -> PromptQueue:
    return PromptQueue(told.append)


def run_all(queue: PromptQueue) -> list[str]:
    ids = []
    while queue.remaining():
        running = queue.take()
        assert running is not None
        ids.append(running.item.prompt_id)
        queue.done(lambda: None)
    return ids


def test_smaller_numbers_run_first(queue: PromptQueue) -> None:
    for prompt_id, number in (("a", 500.0), ("b", -5.0), ("c", 3)):
        queue.put(item(prompt_id, number))
    assert run_all(queue) == ["b", "c", "a"]


def test_every_change_is_told_with_what_remains(queue: PromptQueue, told: list[int]) -> None:
    queue.put(item("a"))
    queue.put(item("b", 1))
    queue.take()
    queue.done(lambda: None)
    assert told == [1, 2, 2, 1]


def test_deleting_the_last_waiting_prompt_is_told_twice(
    queue: PromptQueue, told: list[int]
) -> None:
    queue.put(item("a"))
    queue.put(item("b", 1))
    assert queue.delete("a")
    assert queue.delete("b")
    assert not queue.delete("b")
    assert told == [1, 2, 1, 0, 0]


def test_only_the_named_running_prompt_is_interrupted(queue: PromptQueue) -> None:
    queue.put(item("a"))
    queue.put(item("b", 1))
    running = queue.take()
    assert running is not None
    assert not queue.interrupt("b")
    assert not running.interrupted.is_set()
    assert queue.interrupt("a")
    assert running.interrupted.is_set()


def test_an_interrupt_while_nothing_runs_does_not_hit_the_next(queue: PromptQueue) -> None:
    assert not queue.interrupt()
    queue.put(item("a"))
    running = queue.take()
    assert running is not None
    assert not running.interrupted.is_set()


def test_cancel_stops_the_running_and_takes_back_the_waiting(queue: PromptQueue) -> None:
    queue.put(item("a"))
    queue.put(item("b", 1))
    queue.take()
    assert queue.cancel("a")
    assert queue.cancel("b")
    assert not queue.cancel("b")
    assert not queue.cancel("unknown")


def test_a_waiting_worker_can_be_woken_without_a_prompt(queue: PromptQueue) -> None:
    queue.wake()
    assert queue.take() is None


def test_equal_number_and_id_run_in_the_order_of_arrival(queue: PromptQueue) -> None:
    for _ in range(3):
        queue.put(item("a", 5))
    assert run_all(queue) == ["a", "a", "a"]


def test_as_comfyui_compares_equal_items_are_an_error_and_stay_queued() -> None:
    queue = PromptQueue(lambda remaining: None, as_comfyui_compares)
    queue.put(QueuedPrompt(5, "a", {"1": {"x": 1}}, {}, ("1",)))
    with pytest.raises(TypeError):
        queue.put(QueuedPrompt(5, "a", {"1": {"x": 2}}, {}, ("1",)))
    assert queue.remaining() == 2
