"""Records of runs stay within what a report holds, whatever a backend tells."""

import asyncio
import json
from typing import Any

import pytest

from comfyfleet.api.worker import RUN_EVENTS_MAX
from comfyfleet.comfy.events import Failed, NodeText, Preview
from comfyfleet.errors import RunFailed
from comfyfleet.worker import run_record
from comfyfleet.worker.run_record import PICTURE, RecordTurns, RunRecord

SENDER = {"9": {"class_type": "SaveImageWebsocket", "inputs": {}}}


def told(kind: str, **data: Any) -> str:
    return json.dumps({"type": kind, "data": data})


def record() -> RunRecord:
    return RunRecord(SENDER, "folder-of-the-job")


def test_few_messages_are_told_one_and_all() -> None:
    run = record()
    for value in range(50):
        run.take(told("progress", value=value))
        run.take(told("progress_state", nodes={str(value): {}}))
    assert len(run.pop_live()) == 100
    assert not run.has_live


def test_of_a_long_prompt_the_last_state_tells_of_all() -> None:
    run = record()
    for node in range(2_000):
        run.take(told("executing", node=str(node)))
        run.take(told("progress_state", nodes={str(each): "x" * 50 for each in range(node)}))
    sizes = []
    while run.has_live:
        sizes.append(len(json.dumps(run.pop_live())))
    assert sum(sizes) < 3 * run_record.REPLACED_BYTES_MIN


def test_a_report_holds_so_much_and_the_rest_comes_with_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_record, "REPORT_BYTES_MAX", 1000)
    run = record()
    for number in range(10):
        run.note(Preview("run", "9", "image/png", b"x" * 300))
        run.take(told("executing", node=str(number)))
    assert run.is_too_much
    reports = []
    while run.has_live:
        reports.append(run.pop_live())
    assert len(reports) > 3
    kinds = [kind for report in reports for kind, _ in report]
    assert kinds == [PICTURE, "executing"] * 10


def test_the_last_report_fits_and_keeps_what_names_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_record, "LAST_BYTES_MAX", 5_000)
    run = record()
    for number in range(100):
        run.note(NodeText("run", str(number), "y" * 100))
        run.take(told("progress", value=number))
    run.take(told("executed", node="2", output={"images": [{"filename": "a.png"}]}))
    last = run.pop_all()
    assert last[-1][0] == "executed"
    assert len(json.dumps(last)) < 6_000


def test_a_backend_that_talks_without_end_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_record, "UNREPORTED_BYTES_MAX", 10_000)
    run = record()
    for _ in range(1_000):
        run.note(NodeText("run", "1", "z" * 1_000))
    assert len(run.pop_all()) <= 11


def test_no_report_has_more_messages_than_the_control_plane_takes() -> None:
    run = record()
    for number in range(3 * RUN_EVENTS_MAX):
        run.take(told("executing", node=str(number)))
    assert len(run.pop_live()) <= RUN_EVENTS_MAX
    assert len(run.pop_all()) <= RUN_EVENTS_MAX


FILE = {"images": [{"filename": "a.png", "subfolder": "", "type": "output"}]}


def test_what_names_a_file_holds_back_what_comes_after_it_for_a_while() -> None:
    now = 0.0
    run = RunRecord({}, "folder", clock=lambda: now)
    run.take(told("executing", node="1"))
    run.take(told("executed", node="1", output=FILE))
    run.take(told("executing", node="2"))
    assert [kind for kind, _ in run.pop_live()] == ["executing"]
    assert not run.has_live
    now = run_record.ORDER_SECONDS_MAX + 1
    assert [data["node"] for _, data in run.pop_live()] == ["2"]
    assert [kind for kind, _ in run.pop_all()] == ["executed"]


def test_the_end_of_a_run_is_told_with_its_last_report_only() -> None:
    """History has the run then; and one that failed here may have begun again elsewhere."""
    clock = iter(range(0, 1_000, 10))
    run = RunRecord(SENDER, "folder", clock=lambda: next(clock))
    run.may_report = True
    run.take(told("executed", node="1", output={"images": [{"filename": "a.png"}]}))
    run.take(told("progress", value=1))
    run.take(told("execution_success", prompt_id="x"))
    assert [kind for kind, _ in run.pop_live()] == ["progress"]
    assert not run.has_live
    assert [kind for kind, _ in run.pop_all()] == ["executed", "execution_success"]


def test_results_are_recorded_and_previews_are_not() -> None:
    run = record()
    assert not run.note(Preview("run", "3", "image/jpeg", b"of a sampler"))
    assert run.note(Preview("run", "9", "image/png", b"new", {"display_node_id": "9", "x": "y"}))
    ((kind, data),) = run.pop_live()
    assert (kind, data["base64"]) == (PICTURE, "bmV3")
    assert data["metadata"] == {"display_node_id": "9"}


async def test_a_run_tells_after_the_one_before_it_has_ended() -> None:
    turns, first, second = RecordTurns(), record(), record()
    assert turns.begin(first)
    assert not turns.begin(second)
    waiting = asyncio.create_task(turns.wait_for(second))
    await asyncio.sleep(0)
    assert not waiting.done()
    turns.end(first)
    await waiting


def test_a_client_reads_the_names_that_it_gave() -> None:
    run = RunRecord({}, "folder")
    run.show_as({"folder/1.image.dat": "cat.png"})
    run.take(told("execution_error", current_inputs={"image": ["folder/1.image.dat"]}))
    assert run.pop_all()[0][1] == {"current_inputs": {"image": ["cat.png"]}}


def test_a_report_without_an_answer_is_repeated_unchanged() -> None:
    run = record()
    run.take(told("executing", node="1"))
    first = run.next_report()
    assert first is not None
    run.note_silence(is_refused=False)
    run.take(told("executing", node="2"))
    assert run.next_report() == first
    run.note_answer()
    second = run.next_report()
    assert second is not None
    assert [data["node"] for _, data in second.events] == ["2"]
    assert second.number != first.number


def test_the_final_report_carries_the_one_without_an_answer() -> None:
    run = record()
    run.take(told("executing", node="1"))
    first = run.next_report()
    assert first is not None
    run.note_silence(is_refused=False)
    run.take(told("executing", node="2"))
    last = run.pop_last()
    assert last.unheard is not None
    assert (last.unheard.number, last.unheard.events) == (first.number, first.events)
    assert [data["node"] for _, data in last.events] == ["2"]
    assert [data["node"] for _, data in last.all_events] == ["1", "2"]
    assert last.number not in (None, first.number)


def test_the_final_report_with_an_unanswered_one_still_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_record, "REPORT_BYTES_MAX", 2000)
    monkeypatch.setattr(run_record, "LAST_BYTES_MAX", 4000)
    run = record()
    for number in range(100):
        run.take(told("executing", node=str(number), padding="x" * 50))
    assert run.next_report() is not None
    run.note_silence(is_refused=False)
    assert len(json.dumps(run.pop_last().all_events)) <= 4000


def test_a_refused_report_is_told_again_under_another_number() -> None:
    run = record()
    run.take(told("executing", node="1"))
    first = run.next_report()
    assert first is not None
    run.note_silence(is_refused=True)
    again = run.next_report()
    assert again is not None
    assert again.events == first.events
    assert again.number != first.number


def test_an_older_control_plane_gets_unanswered_messages_again() -> None:
    run = RunRecord(SENDER, "folder-of-the-job", numbers_reports=False)
    run.take(told("executing", node="1"))
    assert run.next_report() is not None
    run.note_silence(is_refused=False)
    last = run.pop_last()
    assert last.unheard is None
    assert [data["node"] for _, data in last.events] == ["1"]


def test_a_restarted_worker_does_not_repeat_numbers() -> None:
    numbers = set()
    for _ in range(100):
        run = record()
        run.take(told("executing", node="1"))
        report = run.next_report()
        assert report is not None
        numbers.add(report.number)
    assert len(numbers) == 100


def priced() -> RunRecord:
    return RunRecord(SENDER, "folder-of-the-job", holds_results=True)


def show_results(run: RunRecord) -> None:
    run.note(NodeText("run", "1", "a poem"))
    run.take(told("pack-shows-text", text="a poem"))
    run.take(told("executed", node="2", output={"text": ["a poem"]}))
    run.take(told("progress", value=1))


def test_what_may_show_a_result_waits_until_it_is_paid_for() -> None:
    run = priced()
    show_results(run)
    run.report_all()
    assert [kind for kind, _ in run.pop_live()] == ["progress"]
    run.release_results()
    assert json.dumps(run.pop_last().events).count("a poem") == 3
    free = record()
    show_results(free)
    assert json.dumps(free.pop_last().events).count("a poem") == 3


def test_a_run_that_is_not_paid_for_quotes_little_of_its_results() -> None:
    poem = "a poem " * 1_000
    failed = told(
        "execution_error",
        node_id="1",
        exception_message=f"no number: {poem}",
        exception_type="ValueError",
        traceback=["line 1"],
        current_inputs={"value": [poem]},
        current_outputs=[poem],
    )
    run, free = priced(), record()
    for each in (run, free):
        show_results(each)
        each.take(failed)
        each.drop_results()
    events = run.pop_last().events
    ((_, error),) = [event for event in events if event[0] == "execution_error"]
    assert len(json.dumps(events)) < 1_500
    assert error["exception_message"].startswith("no number: a poem")
    assert (error["node_id"], error["traceback"]) == ("1", ["line 1"])
    assert (error["current_inputs"], error["current_outputs"]) == ({}, [])
    assert len(json.dumps(free.pop_last().events)) > 3 * len(poem)


def test_messages_of_custom_nodes_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_record, "UNREPORTED_BYTES_MAX", 10_000)
    run = priced()
    for _ in range(1_000):
        run.take(told("pack-shows-text", text="z" * 1_000))
    run.release_results()
    assert len(run.pop_all()) <= 11


ERROR = {
    "node_id": "1",
    "node_type": "Fail",
    "exception_message": "wrong value",
    "exception_type": "ValueError",
    "traceback": ["line 1"],
}


def test_an_error_that_quotes_large_inputs_is_reported_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_record, "LAST_BYTES_MAX", 5_000)
    monkeypatch.setattr(run_record, "ERROR_BYTES_MAX", 2_000)
    run = record()
    run.take(told("executing", node="1"))
    inputs = {"image": ["x" * 10_000]}
    run.take(told("execution_error", **ERROR, current_inputs=inputs, current_outputs=["2"]))
    brief = {**ERROR, "current_inputs": {}, "current_outputs": []}
    assert run.pop_last().events == (("executing", {"node": "1"}), ("execution_error", brief))


def test_the_texts_of_a_large_error_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_record, "ERROR_BYTES_MAX", 2_000)
    run = record()
    large = "x" * 1_000_000
    run.take(told("execution_error", **ERROR | {"exception_message": large, "traceback": [large]}))
    ((_, error),) = run.pop_last().events
    assert (error["node_id"], error["exception_type"]) == ("1", "ValueError")
    assert error["exception_message"][:-1] == large[: run_record.ERROR_CHARACTERS_MAX]
    assert len(json.dumps(error)) < 60_000


def test_the_end_of_a_run_is_never_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_record, "LAST_BYTES_MAX", 100)
    run = record()
    run.take(told("executing", node="1"))
    run.take(told("execution_error", **ERROR))
    assert run.pop_last().events == (("execution_error", ERROR),)


FAILED = Failed("run", "wrong value", "1", "Fail", "ValueError", ("line 1",))


def test_a_failure_that_no_message_told_is_recorded_with_its_reason() -> None:
    run = record()
    run.take(told("executing", node="1.0.0.2"))
    run.take(told("execution_error", **ERROR | {"exception_type": "ExecutionBlocked"}))
    run.note_failure(RunFailed("wrong value", failed=FAILED), 2.0)
    *_, (kind, error) = run.pop_last().events
    assert kind == "execution_error"
    assert error.items() >= {**ERROR, "timestamp": 2_000}.items()


@pytest.mark.parametrize("failed", [FAILED, None, Failed("run", "failed, without a reason")])
def test_a_failure_that_a_message_told_is_recorded_once(failed: Failed | None) -> None:
    run = record()
    run.take(told("execution_error", **ERROR))
    run.note_failure(RunFailed("wrong value", failed=failed), 2.0)
    assert run.pop_last().events == (("execution_error", ERROR),)


@pytest.mark.parametrize("failed", [None, Failed("run", "failed, without a reason")])
def test_a_failure_without_a_reason_is_left_to_the_control_plane(failed: Failed | None) -> None:
    run = record()
    run.note_failure(RunFailed("failed", failed=failed), 2.0)
    assert run.pop_last().events == ()
