"""What has ended can be paged through, and looks like a job."""

from typing import Any

import pytest

from comfyfleet.engine.queue import History
from comfyfleet.protocol.payloads import (
    InvalidQuery,
    QueuedPrompt,
    Record,
    RunOutcome,
    detailed_job,
    ended_job,
    history_record,
    list_jobs,
    read_query,
)

START = ("execution_start", {"prompt_id": "a", "timestamp": 1000})


def ended(
    prompt_id: str = "a",
    *,
    created: int = 1,
    event: str = "execution_success",
    at: int = 1500,
    outputs: Any = None,
    **extra_data: Any,
) -> Record:
    item = QueuedPrompt(7, prompt_id, {"9": {}}, {"create_time": created, **extra_data}, ("9",))
    data = {"prompt_id": prompt_id, "timestamp": at}
    success = event == "execution_success"
    return history_record(item, RunOutcome(success, [START, (event, data)], outputs or {}, {}))


def pages(count: int) -> History:
    history = History()
    for index in range(1, count + 1):
        history.add(str(index), ended(str(index), created=index))
    return history


@pytest.mark.parametrize(
    ("max_items", "offset", "ids"),
    [
        (None, None, "123"),
        (1, None, "3"),
        (2, None, "23"),
        (0, None, ""),
        (99, None, "123"),
        (None, 1, "23"),
        (1, 0, "1"),
        (0, 0, "1"),
        (5, 2, "3"),
        (1, 9, ""),
        (1, -2, "3"),
        (None, -2, "123"),
        (-1, None, ""),
    ],
)
def test_pages_are_cut_as_comfyui_cuts_them(
    max_items: int | None, offset: int | None, ids: str
) -> None:
    assert "".join(pages(3).page(max_items, offset)) == ids


def test_the_oldest_is_forgotten() -> None:
    history = History(items_max=2)
    for index in range(5):
        history.add(str(index), ended(str(index)))
    assert list(history.page()) == ["2", "3", "4"]


def test_the_same_id_again_keeps_its_place() -> None:
    history = pages(2)
    history.add("1", ended("1", created=99))
    assert list(history.page()) == ["1", "2"]
    assert history.get("1")["1"]["prompt"][3]["create_time"] == 99


@pytest.mark.parametrize(
    ("event", "status"),
    [
        ("execution_success", "completed"),
        ("execution_error", "failed"),
        ("execution_interrupted", "cancelled"),
    ],
)
def test_the_status_of_a_job_comes_from_its_last_message(event: str, status: str) -> None:
    job = ended_job("a", ended(event=event))
    assert job["status"] == status
    assert (job["execution_start_time"], job["execution_end_time"]) == (1000, 1500)
    assert ("execution_error" in job) is (status == "failed")


def test_a_saved_file_is_shown_before_a_temporary_one() -> None:
    temporary = {"filename": "t.png", "subfolder": "", "type": "temp"}
    saved = {"filename": "s.png", "subfolder": "", "type": "output"}
    outputs = {"1": {"images": [temporary]}, "2": {"images": [saved], "animated": [True]}}
    job = ended_job("a", ended(outputs=outputs))
    assert job["outputs_count"] == 2
    assert job["preview_output"] == {**saved, "nodeId": "2", "mediaType": "images"}


def test_a_text_is_shown_but_not_counted_and_not_in_full_length() -> None:
    short, long = (
        ended_job("a", ended(outputs={"1": {"text": [text]}})) for text in ("x", "y" * 1025)
    )
    assert short["outputs_count"] == 0
    assert short["preview_output"] == {"content": "x", "nodeId": "1", "mediaType": "text"}
    assert long["preview_output"]["truncated"]
    assert len(long["preview_output"]["content"]) == 1024


@pytest.mark.parametrize("pnginfo", [None, 5, {"workflow": None}, {"workflow": {"id": None}}])
def test_a_workflow_without_id_is_no_trouble(pnginfo: Any) -> None:
    assert "workflow_id" not in ended_job("a", ended(extra_pnginfo=pnginfo))


def test_jobs_are_filtered_by_workflow() -> None:
    history = {"a": ended(extra_pnginfo={"workflow": {"id": "w"}}), "b": ended("b")}
    page = list_jobs(read_query({"workflow_id": "w"}), [], [], history)
    assert [job["id"] for job in page["jobs"]] == ["a"]


def test_jobs_are_sorted_by_duration() -> None:
    history = {"slow": ended("slow", at=9000, created=1), "fast": ended("fast", created=2)}
    page = list_jobs(read_query({"sort_by": "execution_duration"}), [], [], history)
    assert [job["id"] for job in page["jobs"]] == ["slow", "fast"]


def test_a_page_says_where_it_lies() -> None:
    page = list_jobs(read_query({"limit": "1", "offset": "1"}), [], [], pages(3).page())
    assert [job["id"] for job in page["jobs"]] == ["2"]
    assert page["pagination"] == {"offset": 1, "limit": 1, "total": 3, "has_more": True}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"limit": "0"}, "limit must be a positive integer"),
        ({"limit": "x"}, "limit must be an integer"),
        ({"offset": "x"}, "offset must be an integer"),
        ({"sort_by": "x"}, "sort_by must be 'created_at' or 'execution_duration'"),
        ({"sort_order": "x"}, "sort_order must be 'asc' or 'desc'"),
        (
            {"status": "completed, x"},
            "Invalid status value(s): x. "
            "Valid values: pending, in_progress, completed, failed, cancelled",
        ),
    ],
)
def test_a_query_that_makes_no_sense_is_refused(params: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidQuery) as caught:
        read_query(params)
    assert caught.value.message == message


def test_the_details_of_a_job_hold_its_prompt_and_outputs() -> None:
    job = detailed_job("a", ended(outputs={"1": {"text": ["x"]}}))
    assert job["outputs"] == {"1": {"text": ["x"]}}
    assert job["workflow"]["prompt"] == {"9": {}}
    assert job["execution_status"]["status_str"] == "success"
