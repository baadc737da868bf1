"""Small decisions of a worker."""

import json
from pathlib import Path
from uuid import uuid4

import pytest
from tests.unit.worker.test_failures import JOB

from comfyfleet.api.values import VALUES_MAX
from comfyfleet.api.worker import Complete
from comfyfleet.comfy import Description, OutputFile, Outputs, OutputValue
from comfyfleet.comfy.backend import comfyui_variables
from comfyfleet.comfy.events import Cached, NodeDone, NodeStarted, Preview, Progress
from comfyfleet.errors import InvalidInput
from comfyfleet.worker.backend_facts import backend_facts, object_info_bytes, shared_object_info
from comfyfleet.worker.heartbeat import heartbeat_interval
from comfyfleet.worker.job_files import choose_outputs, choose_values, content_type_of
from comfyfleet.worker.lease_runner import LoadedModels
from comfyfleet.worker.run_progress import advance_progress, begin_progress, reported_preview
from comfyfleet.worker.settings import WorkerSettings, concurrency_from, heartbeat_seconds_from


def test_the_variables_of_comfyui_set_the_limits_of_a_worker() -> None:
    usual = WorkerSettings("http://plane", "gpu", "production", "w1", Path("state"))
    given = {"COMFYUI_MAX_RETRIES": "0", "COMFYUI_POLL_INTERVAL": "7", "COMFYUI_TIMEOUT": "90"}
    changed = usual.with_variables(comfyui_variables(given))
    assert (changed.limits.max_retries, changed.limits.poll_seconds) == (0, 7)
    assert changed.job_seconds == 90
    assert usual.with_variables(comfyui_variables({})) == usual


def test_heartbeats_come_more_than_three_times_in_a_lease() -> None:
    assert heartbeat_interval(30, 900) == 30
    assert heartbeat_interval(30, 60) < 20


def test_progress_counts_nodes_and_the_steps_of_the_one_at_work() -> None:
    counts = begin_progress({"1": {}, "2": {}, "3": {}, "4": {}})
    counts = advance_progress(counts, Cached("r", ("1",)))
    counts = advance_progress(counts, NodeStarted("r", "2", "2"))
    counts = advance_progress(counts, Progress("r", "2", 5, 10))
    report = counts.report()
    assert (report.percent, report.node, report.step, report.steps) == (37.5, "2", 5, 10)
    counts = advance_progress(counts, NodeStarted("r", "3", "3"))
    assert counts.report().percent == 50
    counts = advance_progress(counts, NodeDone("r", "3"))
    assert counts.report().percent == 75


def test_a_preview_is_reported_if_it_is_a_small_picture() -> None:
    ids = {
        "node_id": "1",
        "display_node_id": None,
        "image_type": "image/jpeg",
        "prompt_id": "secret",
    }
    found = reported_preview(Preview("r", "1", "image/jpeg", b"x", ids))
    assert found is not None
    assert (found.node_id, found.data_url) == ("1", "data:image/jpeg;base64,eA==")
    assert found.metadata == {"node_id": "1", "display_node_id": None}
    assert reported_preview(Preview("r", "1", "image/jpeg", b"x" * 600_000)) is None
    assert reported_preview(Preview("r", "1", "image/svg+xml", b"x")) is None
    assert reported_preview(None) is None


def test_files_of_the_named_node_and_of_nodes_inside_it_are_chosen() -> None:
    files = tuple(OutputFile(node, "images", f"{node}.png") for node in ("7", "7:1", "70"))
    assert [each.node_id for each in choose_outputs(Outputs(files), "7")] == ["7", "7:1"]
    assert choose_outputs(Outputs(files), "8") == ()
    assert len(choose_outputs(Outputs((*files, *files)), None)) == 3


@pytest.mark.parametrize(
    ("filename", "told", "expected"),
    [
        ("a.png", "application/octet-stream", "image/png"),
        ("a.webp", "text/plain", "image/webp"),
        ("a.MP4", "", "video/mp4"),
        ("a", "image/jpeg; charset=x", "image/jpeg"),
        ("a", "", "application/octet-stream"),
    ],
)
def test_a_files_ending_tells_what_it_is(filename: str, told: str, expected: str) -> None:
    assert content_type_of(filename, told) == expected


def test_values_of_the_output_node_come_first_and_keep_their_types() -> None:
    values = (
        OutputValue("2", "text", "a"),
        OutputValue("7", "score", 0.5),
        OutputValue("7", "facts", {"cats": 2, "dog": False}),
    )
    told = choose_values(Outputs(values=values), "7")
    assert [(each.node_id, each.name, each.value) for each in told] == [
        ("7", "score", 0.5),
        ("7", "facts", {"cats": 2, "dog": False}),
        ("2", "text", "a"),
    ]
    assert choose_values(Outputs(), "7") == ()


def test_a_long_text_is_cut_and_too_many_values_are_left_out() -> None:
    long = choose_values(Outputs(values=(OutputValue("2", "text", "ä" * 200_000),)), None)
    assert 10_000 < len(long[0].value) < 200_000
    many = tuple(OutputValue("2", "text", str(number)) for number in range(1000))
    assert len(choose_values(Outputs(values=many), None)) == VALUES_MAX
    large = tuple(OutputValue(str(number), "text", "x" * 60_000) for number in range(20))
    told = choose_values(Outputs(values=large), None)
    assert 1 < len(told) < 20
    Complete(dispatch_id=1, lease_token=uuid4(), values=told)


def test_a_value_is_told_as_every_database_can_keep_it() -> None:
    odd = {"nan": float("nan"), "nul\0": "a\0b", "half": "\ud800", "deep": (1, None)}
    told = choose_values(Outputs(values=(OutputValue("2", "json", odd),)), None)
    assert told[0].value == {"nan": "nan", "nul\ufffd": "a\ufffdb", "half": "?", "deep": [1, None]}


def test_a_complete_with_too_many_bytes_of_values_is_refused() -> None:
    values = [{"node_id": "1", "name": "text", "value": "x" * 60_000}] * 10
    with pytest.raises(ValueError, match="bytes as JSON"):
        Complete.model_validate({"dispatch_id": 1, "lease_token": uuid4(), "values": values})


def test_models_are_remembered_most_recent_first_until_they_are_let_go() -> None:
    models = LoadedModels()
    for key in ("a", "b", "a", None):
        models.used(JOB.model_copy(update={"model_key": key, "model_set": f"set of {key}"}))
    assert (models.keys, models.set_key) == (("a", "b"), "set of a")
    models.clear()
    assert (models.keys, models.set_key) == ((), None)


def test_it_is_told_whether_a_run_had_to_switch_to_its_model() -> None:
    models = LoadedModels()

    def began(*keys: str | None) -> list[str | None]:
        return [models.began(JOB.model_copy(update={"model_key": key})) for key in keys]

    assert began("a", "a", None, "a") == ["first", "same", None, "same"]
    assert began("b", "a", "a", "b") == ["first", "switched", "same", "switched"]
    models.clear()
    assert began("a") == ["first"]


def test_facts_list_node_types_and_model_files() -> None:
    object_info = {
        "Loader": {
            "input": {
                "required": {"ckpt_name": [["a.safetensors", "none"], {}], "n": ["INT", {}]},
                "optional": {"lora": ["COMBO", {"options": ["l.pt"]}], "odd": None},
            }
        },
        "Broken": "x",
    }
    facts = backend_facts(Description(object_info, "0.28", (), {}))
    assert facts.node_types == ("Broken", "Loader")
    assert facts.model_files == {"Loader.ckpt_name": ("a.safetensors",), "Loader.lora": ("l.pt",)}


def test_the_hash_of_an_object_info_depends_on_the_order_of_inputs_but_not_of_node_types() -> None:
    inputs = {"seed": ["INT", {}], "cfg": ["FLOAT", {"max": 1.0}]}
    first = {"B": {"input": {"required": inputs}}, "A": {"input": {}}}
    moved = {"A": {"input": {}}, "B": {"input": {"required": inputs}}}
    swapped = {"B": {"input": {"required": dict(reversed(inputs.items()))}}, "A": {"input": {}}}
    hashes = [
        backend_facts(Description(info, "0.28", (), {})).object_info_hash
        for info in (first, moved, swapped)
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_the_uploaded_object_info_keeps_the_order_of_the_backend() -> None:
    inputs = {"seed": ["INT", {"min": 0, "max": 2**64 - 1}], "cfg": ["FLOAT", {"max": 1.0}]}
    object_info = {
        "Z": {"input": {"optional": {"b": ["X"]}, "required": inputs}},
        "A": {
            "output": ["IMAGE"],
            "input": {"required": {"image": [["my.png"], {"image_upload": True}]}},
        },
    }
    shared = {
        **object_info,
        "A": {"output": ["IMAGE"], "input": {"required": {"image": [[], {"image_upload": True}]}}},
    }
    text = object_info_bytes(shared_object_info(object_info)).decode()
    assert text == json.dumps(shared, separators=(",", ":"))


@pytest.mark.parametrize("text", ["0", "x", "1.5", "65", "-1"])
def test_a_wrong_concurrency_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidInput, match="COMFYFLEET_MAX_CONCURRENCY"):
        concurrency_from({"COMFYFLEET_MAX_CONCURRENCY": text})


@pytest.mark.parametrize("text", ["0", "x", "nan", "301"])
def test_a_wrong_heartbeat_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidInput, match="COMFYFLEET_HEARTBEAT_SECONDS"):
        heartbeat_seconds_from({"COMFYFLEET_HEARTBEAT_SECONDS": text})
    assert heartbeat_seconds_from({}) == 30


def test_the_variables_of_the_original_worker_count_where_ours_are_not_set() -> None:
    environ = {"MAX_CONCURRENCY": "2", "HEARTBEAT_INTERVAL_SECONDS": "5"}
    assert (concurrency_from(environ), heartbeat_seconds_from(environ)) == (2, 5.0)
    ours = {"COMFYFLEET_MAX_CONCURRENCY": "3", "COMFYFLEET_HEARTBEAT_SECONDS": "7"}
    assert (concurrency_from(environ | ours), heartbeat_seconds_from(environ | ours)) == (3, 7.0)
    with pytest.raises(InvalidInput, match=r"^MAX_CONCURRENCY must .* not 'two'"):
        concurrency_from({"MAX_CONCURRENCY": "two"})
