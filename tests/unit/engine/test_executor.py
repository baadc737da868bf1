"""Nodes run in ComfyUI's order, and what is told about it is told in ComfyUI's order."""

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support.backends.nodes import link
from tests.support.backends.prompts import node
from tests.support.backends.recording_audience import ExecutorSetup

from comfyfleet.engine.run import MissingNode


@pytest.fixture
def executor_setup(tmp_path: Path) -> ExecutorSetup:
    return ExecutorSetup(tmp_path)


CHAIN = {
    "1": node("Say", word="a"),
    "2": node("Join", left=link("1"), right="b"),
    "9": node("Show", text=link("2")),
}


def test_a_fresh_run_is_told_from_start_to_success(executor_setup: ExecutorSetup) -> None:
    outcome = executor_setup.run(CHAIN)
    assert executor_setup.listener.events() == [
        "start",
        "cached",
        *("1-", "executing 1", "1+"),
        *("1+ 2-", "executing 2", "1+ 2+"),
        *("1+ 2+ 9-", "executing 9", "executed 9", "1+ 2+ 9+"),
        "success",
    ]
    assert outcome.success
    assert outcome.outputs == {"9": {"text": ["ab"]}}
    assert outcome.meta["9"] == {
        "node_id": "9",
        "display_node": "9",
        "parent_node": None,
        "real_node_id": "9",
    }


def test_the_same_prompt_again_is_answered_from_the_cache(executor_setup: ExecutorSetup) -> None:
    executor_setup.run(CHAIN)
    executor_setup.listener.take()
    outcome = executor_setup.run(CHAIN)
    assert executor_setup.listener.events() == [
        "start",
        "cached 1,2,9",
        "executed 9",
        "9+",
        "success",
    ]
    assert outcome.outputs == {"9": {"text": ["ab"]}}


def test_the_cache_knows_content_not_ids(executor_setup: ExecutorSetup) -> None:
    executor_setup.run(CHAIN)
    executor_setup.listener.take()
    renamed = {
        "a": node("Say", word="a"),
        "b": node("Join", left=link("a"), right="b"),
        "c": node("Show", text=link("b")),
    }
    outcome = executor_setup.run(renamed, "c")
    assert executor_setup.listener.events()[1] == "cached a,b,c"
    assert outcome.meta["c"]["node_id"] == "9"


@pytest.mark.parametrize("same", [True, 1.0])
def test_one_and_true_and_one_point_nought_are_the_same_to_the_cache(
    executor_setup: ExecutorSetup, same: Any
) -> None:
    executor_setup.run({"9": node("Show", text=1)})
    assert executor_setup.run({"9": node("Show", text=same)}).outputs == {"9": {"text": ["1"]}}


def test_the_text_one_is_not_the_number_one(executor_setup: ExecutorSetup) -> None:
    executor_setup.run({"9": node("Show", text=1)})
    executor_setup.listener.take()
    executor_setup.run({"9": node("Show", text="1")})
    assert executor_setup.listener.events()[1] == "cached"


def test_an_input_that_the_class_does_not_know_makes_another_node_of_it(
    executor_setup: ExecutorSetup,
) -> None:
    executor_setup.run({"9": node("Show", text=1)})
    executor_setup.listener.take()
    executor_setup.run({"9": node("Show", text=1, nonsense=2)})
    assert executor_setup.listener.events()[1] == "cached"


def test_a_twin_in_the_same_prompt_shows_the_first_ones_result(
    executor_setup: ExecutorSetup,
) -> None:
    outcome = executor_setup.run({**CHAIN, "8": node("Show", text=link("2"))}, "8", "9")
    events = executor_setup.listener.events()
    assert "executing 8" in events
    assert "executing 9" not in events
    assert "executed 9" in events
    assert outcome.meta["9"]["node_id"] == "8"


def test_a_cached_output_without_result_says_null(executor_setup: ExecutorSetup) -> None:
    prompt = {"9": node("Keep", text="x")}
    executor_setup.run(prompt)
    executor_setup.listener.received.clear()
    executor_setup.run(prompt)
    assert [
        data["output"] for _, event, data in executor_setup.listener.received if event == "executed"
    ] == [None]


def test_a_node_that_shows_its_result_is_shown_from_the_cache_too(
    executor_setup: ExecutorSetup,
) -> None:
    prompt = {"2": node("Peek", text="x"), "9": node("Show", text=link("2"))}
    executor_setup.run(prompt)
    executor_setup.listener.take()
    outcome = executor_setup.run(prompt)
    assert executor_setup.listener.events()[-2:] == ["executed 2", "success"]
    assert outcome.outputs == {"9": {"text": ["x"]}, "2": {"text": ["x"]}}


def test_a_changed_file_is_read_again(executor_setup: ExecutorSetup) -> None:
    prompt = {"1": node("Read", name="a.txt"), "9": node("Show", text=link("1"))}
    for content in ("one", "two"):
        (executor_setup.folders.input / "a.txt").write_text(content)
        assert executor_setup.run(prompt).outputs == {"9": {"text": [content]}}


def test_results_are_forgotten_on_reset(executor_setup: ExecutorSetup) -> None:
    executor_setup.run(CHAIN)
    executor_setup.executor.reset()
    executor_setup.listener.take()
    executor_setup.run(CHAIN)
    assert executor_setup.listener.events()[1] == "cached"


def test_only_what_the_last_prompt_had_is_remembered(executor_setup: ExecutorSetup) -> None:
    executor_setup.run(CHAIN)
    executor_setup.run({"9": node("Show", text="other")})
    executor_setup.listener.take()
    executor_setup.run(CHAIN)
    assert executor_setup.listener.events()[1] == "cached"


def test_a_run_whose_first_node_fails_leaves_the_results_of_the_one_before(
    executor_setup: ExecutorSetup,
) -> None:
    executor_setup.run(CHAIN)
    executor_setup.run({"1": node("Fail", word="x"), "9": node("Show", text=link("1"))})
    executor_setup.listener.take()
    executor_setup.run(CHAIN)
    assert executor_setup.listener.events()[1] == "cached 1,2,9"


def test_a_lazy_input_runs_only_when_chosen_and_the_chooser_is_announced_twice(
    executor_setup: ExecutorSetup,
) -> None:
    prompt = {
        "1": node("Say", word="no"),
        "2": node("Say", word="yes"),
        "5": node("Either", second=True, one=link("1"), two=link("2")),
        "9": node("Show", text=link("5")),
    }
    outcome = executor_setup.run(prompt)
    assert [e for e in executor_setup.listener.events() if e.startswith("executing")] == [
        "executing 5",
        "executing 2",
        "executing 5",
        "executing 9",
    ]
    assert outcome.outputs == {"9": {"text": ["yes"]}}


def test_the_last_link_of_a_node_runs_first(executor_setup: ExecutorSetup) -> None:
    prompt = {
        "1": node("Say", word="a"),
        "2": node("Say", word="b"),
        "3": node("Join", left=link("1"), right=link("2")),
        "9": node("Show", text=link("3")),
    }
    executor_setup.run(prompt)
    assert [e for e in executor_setup.listener.events() if e.startswith("executing")][:2] == [
        "executing 2",
        "executing 1",
    ]


def test_an_output_that_is_ready_goes_before_everything_else(executor_setup: ExecutorSetup) -> None:
    prompt = {**CHAIN, "8": node("Show", text=link("1"))}
    executor_setup.run(prompt, "9", "8")
    assert [e for e in executor_setup.listener.events() if e.startswith("executing")][:2] == [
        "executing 1",
        "executing 8",
    ]


def test_a_failing_node_ends_the_run_and_stays_running_in_the_progress(
    executor_setup: ExecutorSetup,
) -> None:
    prompt = {
        "1": node("Say", word="a"),
        "2": node("Fail", word="milk"),
        "8": node("Show", text=link("1")),
        "9": node("Show", text=link("2")),
    }
    outcome = executor_setup.run(prompt, "8", "9")
    assert executor_setup.listener.events()[-2:] == ["executing 2", "error 2"]
    assert not outcome.success
    assert outcome.outputs == {"8": {"text": ["a"]}}
    event, data = outcome.messages[-1]
    assert event == "execution_error"
    assert data["exception_message"] == "no milk today\n"
    assert data["exception_type"] == "Exception"
    assert data["executed"] == ["1", "8"]
    assert data["current_inputs"] == {"word": ["milk"]}
    assert data["current_outputs"] == ["1", "2", "8", "9"]


def test_an_undeclared_link_is_followed_and_then_fails_the_call(
    executor_setup: ExecutorSetup,
) -> None:
    prompt = {
        "1": node("Say", word="a"),
        "2": node("Say", word="b"),
        "9": node("Show", text=link("1"), more=link("2")),
    }
    _, data = executor_setup.run(prompt).messages[-1]
    assert data["exception_message"] == (
        "Show.execute() got an unexpected keyword argument 'more'\n"
    )
    assert data["exception_type"] == "TypeError"
    assert data["executed"] == ["2", "1"]
    assert list(data["current_inputs"]) == ["text", "more", "prompt", "extra_pnginfo"]


def test_an_undeclared_link_to_half_an_output_fails_that_node(
    executor_setup: ExecutorSetup,
) -> None:
    prompt = {"1": node("Say", word="a"), "9": node("Show", text="x", more=["1", 0.5])}
    event, data = executor_setup.run(prompt).messages[-1]
    assert (event, data["node_id"]) == ("execution_error", "9")
    assert "executing 9" not in executor_setup.listener.events()


def test_an_undeclared_constant_is_ignored(executor_setup: ExecutorSetup) -> None:
    assert executor_setup.run({"9": node("Show", text="x", more=5)}).success


def test_an_undeclared_link_to_nowhere_fails_the_run_and_not_the_worker(
    executor_setup: ExecutorSetup,
) -> None:
    prompt = {"1": node("Say", word="a"), "9": node("Show", text=link("1"), more=link("77"))}
    outcome = executor_setup.run(prompt)
    event, data = outcome.messages[-1]
    assert (event, data["node_id"]) == ("execution_error", "9")
    assert data["exception_message"] == "Node 77 not found"
    assert not outcome.success
    assert executor_setup.run(CHAIN).success


def test_where_comfyui_dies_a_mortal_executor_raises(tmp_path: Path) -> None:
    executor_setup = ExecutorSetup(tmp_path, dangling_link_kills=True)
    with pytest.raises(MissingNode):
        executor_setup.run({"9": node("Show", text="x", more=link("77"))})


@pytest.mark.parametrize("before", ["good", "bad"])
def test_a_cycle_through_an_undeclared_link_inherits_the_verdict_of_the_run_before(
    executor_setup: ExecutorSetup, before: str
) -> None:
    executor_setup.run(
        CHAIN if before == "good" else {"9": node("Show", text="x", y=link("9"), z=["8", 0])}
    )
    prompt = {"1": node("Say", word="a", more=link("1")), "9": node("Show", text=link("1"))}
    outcome = executor_setup.run(prompt)
    event, data = outcome.messages[-1]
    assert (event, data["node_id"]) == ("execution_error", "9")
    assert data["exception_type"] == "graph.DependencyCycleError"
    assert outcome.success is (before == "good")


def test_an_interrupt_names_the_node_that_was_about_to_start(executor_setup: ExecutorSetup) -> None:
    interrupted = threading.Event()
    interrupted.set()
    outcome = executor_setup.run(CHAIN, interrupted=interrupted)
    assert executor_setup.listener.events() == [
        "start",
        "cached",
        "1-",
        "executing 1",
        "interrupted 1",
    ]
    assert not outcome.success
    assert executor_setup.run(CHAIN).success


def test_an_interrupt_takes_effect_at_the_next_step(executor_setup: ExecutorSetup) -> None:
    prompt = {
        "1": node("Step", steps=1000, milliseconds=1000),
        "9": node("Show", text=link("1")),
    }
    interrupted = threading.Event()
    threading.Timer(0.05, interrupted.set).start()
    executor_setup.run(prompt, interrupted=interrupted)
    assert executor_setup.listener.events()[-1] == "interrupted 1"


def test_progress_counts_from_nought_and_ends_full(executor_setup: ExecutorSetup) -> None:
    executor_setup.run(
        {"1": node("Step", steps=2, milliseconds=0), "9": node("Show", text=link("1"))}
    )
    steps = [data for _, event, data in executor_setup.listener.received if event == "progress"]
    assert [(step["value"], step["max"]) for step in steps] == [(0, 2), (1, 2)]
    assert executor_setup.listener.events()[3:9] == [
        "executing 1",
        "1-",
        "progress 1",
        "1-",
        "progress 1",
        "1+",
    ]


@pytest.mark.parametrize(
    ("metadata", "order"), [(False, ["progress 1", "binary 1"]), (True, ["binary 4", "progress 1"])]
)
def test_a_preview_comes_after_the_progress_unless_it_has_metadata(
    executor_setup: ExecutorSetup, metadata: bool, order: list[str]
) -> None:
    executor_setup.listener.metadata = metadata
    step = node("Step", steps=1, milliseconds=0, preview="jpeg")
    executor_setup.run({"1": step, "9": node("Show", text=link("1"))})
    events = executor_setup.listener.events()
    assert [event for event in events if event.startswith(("progress", "binary"))] == order


def test_without_a_client_only_progress_and_interrupts_are_told_to_all(
    executor_setup: ExecutorSetup,
) -> None:
    outcome = executor_setup.run(CHAIN, client_id=None)
    assert {(to, event) for to, event, _ in executor_setup.listener.received} == {
        (None, "progress_state")
    }
    assert [event for event, _ in outcome.messages] == [
        "execution_start",
        "execution_cached",
        "execution_success",
    ]
    interrupted = threading.Event()
    interrupted.set()
    executor_setup.listener.take()
    executor_setup.run({"9": node("Show", text="new")}, client_id=None, interrupted=interrupted)
    assert executor_setup.listener.received[-1][:2] == (None, "execution_interrupted")


def test_a_line_of_text_goes_to_everybody(executor_setup: ExecutorSetup) -> None:
    executor_setup.run({"1": node("Caption", text="hi"), "9": node("Show", text=link("1"))})
    assert (None, "binary", b"\0\0\0\3\0\0\0\x011hi") in executor_setup.listener.received


def test_a_prompt_deeper_than_pythons_stack_runs(executor_setup: ExecutorSetup) -> None:
    depth = 2 * sys.getrecursionlimit()
    prompt = {"0": node("Say", word="a")}
    for index in range(1, depth):
        prompt[str(index)] = node("Join", left=link(str(index - 1)), right=".")
    executor_setup.listener.deaf = True
    outcome = executor_setup.run({**prompt, "end": node("Show", text=link(str(depth - 1)))}, "end")
    assert outcome.outputs == {"end": {"text": ["a" + "." * (depth - 1)]}}
