"""Nodes run in ComfyUI's order, and what is told about it is told in ComfyUI's order."""

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support.backends.audience import Bench
from tests.support.backends.nodes import link
from tests.support.backends.prompts import node

from comfyfleet.engine.run import MissingNode


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


CHAIN = {
    "1": node("Say", word="a"),
    "2": node("Join", left=link("1"), right="b"),
    "9": node("Show", text=link("2")),
}


def test_a_fresh_run_is_told_from_start_to_success(bench: Bench) -> None:
    outcome = bench.run(CHAIN)
    assert bench.listener.events() == [
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


def test_the_same_prompt_again_is_answered_from_the_cache(bench: Bench) -> None:
    bench.run(CHAIN)
    bench.listener.take()
    outcome = bench.run(CHAIN)
    assert bench.listener.events() == ["start", "cached 1,2,9", "executed 9", "9+", "success"]
    assert outcome.outputs == {"9": {"text": ["ab"]}}


def test_the_cache_knows_content_not_ids(bench: Bench) -> None:
    bench.run(CHAIN)
    bench.listener.take()
    renamed = {
        "a": node("Say", word="a"),
        "b": node("Join", left=link("a"), right="b"),
        "c": node("Show", text=link("b")),
    }
    outcome = bench.run(renamed, "c")
    assert bench.listener.events()[1] == "cached a,b,c"
    assert outcome.meta["c"]["node_id"] == "9"


@pytest.mark.parametrize("same", [True, 1.0])
def test_one_and_true_and_one_point_nought_are_the_same_to_the_cache(
    bench: Bench, same: Any
) -> None:
    bench.run({"9": node("Show", text=1)})
    assert bench.run({"9": node("Show", text=same)}).outputs == {"9": {"text": ["1"]}}


def test_the_text_one_is_not_the_number_one(bench: Bench) -> None:
    bench.run({"9": node("Show", text=1)})
    bench.listener.take()
    bench.run({"9": node("Show", text="1")})
    assert bench.listener.events()[1] == "cached"


def test_an_input_that_the_class_does_not_know_makes_another_node_of_it(bench: Bench) -> None:
    bench.run({"9": node("Show", text=1)})
    bench.listener.take()
    bench.run({"9": node("Show", text=1, nonsense=2)})
    assert bench.listener.events()[1] == "cached"


def test_a_twin_in_the_same_prompt_shows_the_first_ones_result(bench: Bench) -> None:
    outcome = bench.run({**CHAIN, "8": node("Show", text=link("2"))}, "8", "9")
    events = bench.listener.events()
    assert "executing 8" in events
    assert "executing 9" not in events
    assert "executed 9" in events
    assert outcome.meta["9"]["node_id"] == "8"


def test_a_cached_output_without_result_says_null(bench: Bench) -> None:
    prompt = {"9": node("Keep", text="x")}
    bench.run(prompt)
    bench.listener.heard.clear()
    bench.run(prompt)
    assert [data["output"] for _, event, data in bench.listener.heard if event == "executed"] == [
        None
    ]


def test_a_node_that_shows_its_result_is_shown_from_the_cache_too(bench: Bench) -> None:
    prompt = {"2": node("Peek", text="x"), "9": node("Show", text=link("2"))}
    bench.run(prompt)
    bench.listener.take()
    outcome = bench.run(prompt)
    assert bench.listener.events()[-2:] == ["executed 2", "success"]
    assert outcome.outputs == {"9": {"text": ["x"]}, "2": {"text": ["x"]}}


def test_a_changed_file_is_read_again(bench: Bench) -> None:
    prompt = {"1": node("Read", name="a.txt"), "9": node("Show", text=link("1"))}
    for content in ("one", "two"):
        (bench.folders.input / "a.txt").write_text(content)
        assert bench.run(prompt).outputs == {"9": {"text": [content]}}


def test_results_are_forgotten_on_reset(bench: Bench) -> None:
    bench.run(CHAIN)
    bench.executor.reset()
    bench.listener.take()
    bench.run(CHAIN)
    assert bench.listener.events()[1] == "cached"


def test_only_what_the_last_prompt_had_is_remembered(bench: Bench) -> None:
    bench.run(CHAIN)
    bench.run({"9": node("Show", text="other")})
    bench.listener.take()
    bench.run(CHAIN)
    assert bench.listener.events()[1] == "cached"


def test_a_run_whose_first_node_fails_leaves_the_results_of_the_one_before(bench: Bench) -> None:
    bench.run(CHAIN)
    bench.run({"1": node("Fail", word="x"), "9": node("Show", text=link("1"))})
    bench.listener.take()
    bench.run(CHAIN)
    assert bench.listener.events()[1] == "cached 1,2,9"


def test_a_lazy_input_runs_only_when_chosen_and_the_chooser_is_announced_twice(
    bench: Bench,
) -> None:
    prompt = {
        "1": node("Say", word="no"),
        "2": node("Say", word="yes"),
        "5": node("Either", second=True, one=link("1"), two=link("2")),
        "9": node("Show", text=link("5")),
    }
    outcome = bench.run(prompt)
    assert [e for e in bench.listener.events() if e.startswith("executing")] == [
        "executing 5",
        "executing 2",
        "executing 5",
        "executing 9",
    ]
    assert outcome.outputs == {"9": {"text": ["yes"]}}


def test_the_last_link_of_a_node_runs_first(bench: Bench) -> None:
    prompt = {
        "1": node("Say", word="a"),
        "2": node("Say", word="b"),
        "3": node("Join", left=link("1"), right=link("2")),
        "9": node("Show", text=link("3")),
    }
    bench.run(prompt)
    assert [e for e in bench.listener.events() if e.startswith("executing")][:2] == [
        "executing 2",
        "executing 1",
    ]


def test_an_output_that_is_ready_goes_before_everything_else(bench: Bench) -> None:
    prompt = {**CHAIN, "8": node("Show", text=link("1"))}
    bench.run(prompt, "9", "8")
    assert [e for e in bench.listener.events() if e.startswith("executing")][:2] == [
        "executing 1",
        "executing 8",
    ]


def test_a_failing_node_ends_the_run_and_stays_running_in_the_progress(bench: Bench) -> None:
    prompt = {
        "1": node("Say", word="a"),
        "2": node("Fail", word="milk"),
        "8": node("Show", text=link("1")),
        "9": node("Show", text=link("2")),
    }
    outcome = bench.run(prompt, "8", "9")
    assert bench.listener.events()[-2:] == ["executing 2", "error 2"]
    assert not outcome.success
    assert outcome.outputs == {"8": {"text": ["a"]}}
    event, data = outcome.messages[-1]
    assert event == "execution_error"
    assert data["exception_message"] == "no milk today\n"
    assert data["exception_type"] == "Exception"
    assert data["executed"] == ["1", "8"]
    assert data["current_inputs"] == {"word": ["milk"]}
    assert data["current_outputs"] == ["1", "2", "8", "9"]


def test_an_undeclared_link_is_followed_and_then_fails_the_call(bench: Bench) -> None:
    prompt = {
        "1": node("Say", word="a"),
        "2": node("Say", word="b"),
        "9": node("Show", text=link("1"), more=link("2")),
    }
    _, data = bench.run(prompt).messages[-1]
    assert data["exception_message"] == (
        "Show.execute() got an unexpected keyword argument 'more'\n"
    )
    assert data["exception_type"] == "TypeError"
    assert data["executed"] == ["2", "1"]
    assert list(data["current_inputs"]) == ["text", "more", "prompt", "extra_pnginfo"]


def test_an_undeclared_link_to_half_an_output_fails_that_node(bench: Bench) -> None:
    prompt = {"1": node("Say", word="a"), "9": node("Show", text="x", more=["1", 0.5])}
    event, data = bench.run(prompt).messages[-1]
    assert (event, data["node_id"]) == ("execution_error", "9")
    assert "executing 9" not in bench.listener.events()


def test_an_undeclared_constant_is_ignored(bench: Bench) -> None:
    assert bench.run({"9": node("Show", text="x", more=5)}).success


def test_an_undeclared_link_to_nowhere_fails_the_run_and_not_the_worker(bench: Bench) -> None:
    prompt = {"1": node("Say", word="a"), "9": node("Show", text=link("1"), more=link("77"))}
    outcome = bench.run(prompt)
    event, data = outcome.messages[-1]
    assert (event, data["node_id"]) == ("execution_error", "9")
    assert data["exception_message"] == "Node 77 not found"
    assert not outcome.success
    assert bench.run(CHAIN).success


def test_where_comfyui_dies_a_mortal_executor_raises(tmp_path: Path) -> None:
    bench = Bench(tmp_path, dangling_link_kills=True)
    with pytest.raises(MissingNode):
        bench.run({"9": node("Show", text="x", more=link("77"))})


@pytest.mark.parametrize("before", ["good", "bad"])
def test_a_cycle_through_an_undeclared_link_inherits_the_verdict_of_the_run_before(
    bench: Bench, before: str
) -> None:
    bench.run(CHAIN if before == "good" else {"9": node("Show", text="x", y=link("9"), z=["8", 0])})
    prompt = {"1": node("Say", word="a", more=link("1")), "9": node("Show", text=link("1"))}
    outcome = bench.run(prompt)
    event, data = outcome.messages[-1]
    assert (event, data["node_id"]) == ("execution_error", "9")
    assert data["exception_type"] == "graph.DependencyCycleError"
    assert outcome.success is (before == "good")


def test_an_interrupt_names_the_node_that_was_about_to_start(bench: Bench) -> None:
    interrupted = threading.Event()
    interrupted.set()
    outcome = bench.run(CHAIN, interrupted=interrupted)
    assert bench.listener.events() == ["start", "cached", "1-", "executing 1", "interrupted 1"]
    assert not outcome.success
    assert bench.run(CHAIN).success


def test_an_interrupt_takes_effect_at_the_next_step(bench: Bench) -> None:
    prompt = {
        "1": node("Step", steps=1000, milliseconds=1000),
        "9": node("Show", text=link("1")),
    }
    interrupted = threading.Event()
    threading.Timer(0.05, interrupted.set).start()
    bench.run(prompt, interrupted=interrupted)
    assert bench.listener.events()[-1] == "interrupted 1"


def test_progress_counts_from_nought_and_ends_full(bench: Bench) -> None:
    bench.run({"1": node("Step", steps=2, milliseconds=0), "9": node("Show", text=link("1"))})
    steps = [data for _, event, data in bench.listener.heard if event == "progress"]
    assert [(step["value"], step["max"]) for step in steps] == [(0, 2), (1, 2)]
    assert bench.listener.events()[3:9] == [
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
    bench: Bench, metadata: bool, order: list[str]
) -> None:
    bench.listener.metadata = metadata
    step = node("Step", steps=1, milliseconds=0, preview="jpeg")
    bench.run({"1": step, "9": node("Show", text=link("1"))})
    events = bench.listener.events()
    assert [event for event in events if event.startswith(("progress", "binary"))] == order


def test_without_a_client_only_progress_and_interrupts_are_told_to_all(bench: Bench) -> None:
    outcome = bench.run(CHAIN, client_id=None)
    assert {(to, event) for to, event, _ in bench.listener.heard} == {(None, "progress_state")}
    assert [event for event, _ in outcome.messages] == [
        "execution_start",
        "execution_cached",
        "execution_success",
    ]
    interrupted = threading.Event()
    interrupted.set()
    bench.listener.take()
    bench.run({"9": node("Show", text="new")}, client_id=None, interrupted=interrupted)
    assert bench.listener.heard[-1][:2] == (None, "execution_interrupted")


def test_a_line_of_text_goes_to_everybody(bench: Bench) -> None:
    bench.run({"1": node("Caption", text="hi"), "9": node("Show", text=link("1"))})
    assert (None, "binary", b"\0\0\0\3\0\0\0\x011hi") in bench.listener.heard


def test_a_prompt_deeper_than_pythons_stack_runs(bench: Bench) -> None:
    depth = 2 * sys.getrecursionlimit()
    prompt = {"0": node("Say", word="a")}
    for index in range(1, depth):
        prompt[str(index)] = node("Join", left=link(str(index - 1)), right=".")
    bench.listener.deaf = True
    outcome = bench.run({**prompt, "end": node("Show", text=link(str(depth - 1)))}, "end")
    assert outcome.outputs == {"end": {"text": ["a" + "." * (depth - 1)]}}
