import json
import struct
from typing import Any

import pytest

from comfyfleet.comfy import messages
from comfyfleet.comfy.answers import RECEIVED_CHARS_MAX
from comfyfleet.comfy.events import (
    Blocked,
    Cached,
    Cancelled,
    Failed,
    NodeDone,
    NodeStarted,
    NodeText,
    Preview,
    Progress,
    Started,
    Succeeded,
)
from comfyfleet.comfy.messages import (
    CURRENT_RUN,
    MESSAGES_BYTES_MAX,
    Inbox,
    NodeStates,
    QueueStatus,
    RunOver,
    UnknownMessage,
    parse_log,
    parse_message,
)
from comfyfleet.comfy.sockets import FRAME_BYTES_MAX
from comfyfleet.errors import UnexpectedAnswer

ERROR = {
    "prompt_id": "p",
    "node_id": "3",
    "node_type": "KSampler",
    "exception_type": "RuntimeError",
    "exception_message": "Allocation on device\nTIPS: use less\n",
    "traceback": ["line 1"],
}


def text(kind: str, data: object) -> str:
    return json.dumps({"type": kind, "data": data})


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("status", {"status": {"exec_info": {"queue_remaining": 3}}, "sid": "a"}, QueueStatus(3)),
        ("execution_start", {"prompt_id": "p", "timestamp": 1}, Started("p")),
        ("execution_cached", {"prompt_id": "p", "nodes": ["1"]}, Cached("p", ("1",))),
        ("executing", {"node": "1", "prompt_id": "p"}, NodeStarted("p", "1", "1")),
        (
            "executing",
            {"node": "1.0.2", "display_node": "1", "prompt_id": "p"},
            NodeStarted("p", "1.0.2", "1"),
        ),
        ("executing", {"node": "1"}, NodeStarted(CURRENT_RUN, "1", "1")),
        ("executing", {"node": None, "prompt_id": "p"}, RunOver("p")),
        (
            "progress",
            {"value": 1, "max": 20.0, "prompt_id": "p", "node": "1"},
            Progress("p", "1", 1, 20),
        ),
        (
            "progress_state",
            {"prompt_id": "p", "nodes": {"1": {"state": "finished"}, "2": {"state": "running"}}},
            NodeStates("p", ("1",)),
        ),
        ("executed", {"node": "1", "prompt_id": "p", "output": None}, NodeDone("p", "1")),
        (
            "executed",
            {"node": "1", "prompt_id": "p", "output": {"text": ["a"]}},
            NodeDone("p", "1", {"text": ["a"]}),
        ),
        ("execution_success", {"prompt_id": "p"}, Succeeded("p")),
        ("execution_interrupted", {"prompt_id": "p", "node_id": "1"}, Cancelled("p", "1")),
        (
            "execution_error",
            ERROR,
            Failed(
                "p",
                "Allocation on device\nTIPS: use less",
                "3",
                "KSampler",
                "RuntimeError",
                ("line 1",),
            ),
        ),
        (
            "execution_error",
            {**ERROR, "exception_type": "ExecutionBlocked", "exception_message": "closed"},
            Blocked("p", "3", "KSampler", "closed"),
        ),
        ("feature_flags", {"assets": False}, UnknownMessage("feature_flags")),
        ("crystools.monitor", {"cpu": 1}, UnknownMessage("crystools.monitor")),
    ],
)
def test_each_message_becomes_its_type(kind: str, data: object, message: object) -> None:
    assert parse_message(text(kind, data)) == message


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (struct.pack(">II", 1, 1) + b"j", Preview(CURRENT_RUN, None, "image/jpeg", b"j")),
        (struct.pack(">II", 1, 2) + b"p", Preview(CURRENT_RUN, None, "image/png", b"p")),
        (struct.pack(">II", 3, 2) + b"12hello", NodeText(CURRENT_RUN, "12", "hello")),
        (struct.pack(">I", 2), UnknownMessage("binary 2")),
    ],
)
def test_each_frame_becomes_its_type(frame: bytes, message: object) -> None:
    assert parse_message(frame) == message


def test_a_preview_with_metadata_says_whose_it_is() -> None:
    header = json.dumps({"node_id": "9", "prompt_id": "p", "image_type": "image/png"}).encode()
    frame = struct.pack(">II", 4, len(header)) + header + b"picture"
    assert parse_message(frame) == Preview("p", "9", "image/png", b"picture")


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "garbage",
        "[]",
        "5",
        "[" * 100_000,
        '{"data": {}}',
        '{"type": "progress"}',
        text("progress", []),
        text("progress", {"value": "1", "max": 2}),
        text("progress", {"value": True, "max": 2}),
        text("executing", {"node": 5}),
        text("executed", {"node": "1", "prompt_id": "p", "output": []}),
        text("execution_cached", {"prompt_id": "p", "nodes": [1]}),
        text("progress_state", {"prompt_id": "p", "nodes": {"1": 1}}),
        text("execution_error", {"prompt_id": "p"}),
        text("status", {"status": {"exec_info": {}}}),
        b"",
        b"\x00\x00\x00",
        struct.pack(">I", 1),
        struct.pack(">II", 3, 100) + b"short",
        struct.pack(">II", 3, 1) + b"1\xff",
        struct.pack(">II", 4, 2) + b"no",
    ],
)
def test_a_shape_that_is_not_known_is_told_with_what_came(raw: str | bytes) -> None:
    with pytest.raises(UnexpectedAnswer) as caught:
        parse_message(raw)
    assert len(caught.value.details["received"]) < RECEIVED_CHARS_MAX + 100


@pytest.mark.parametrize(
    ("exception_type", "message", "retryable"),
    [
        ("torch.OutOfMemoryError", "Allocation on device", True),
        ("RuntimeError", "CUDA error: an illegal memory access was encountered", True),
        ("ValueError", "wrong value", False),
        ("ValueError", "no number: 'an illegal memory access'", False),
        ("ValueError", "OutOfMemoryError", False),
    ],
)
def test_a_failure_of_the_gpu_may_be_tried_elsewhere(
    exception_type: str, message: str, retryable: bool
) -> None:
    data = {**ERROR, "exception_type": exception_type, "exception_message": message}
    failed = parse_message(text("execution_error", data))
    assert isinstance(failed, Failed)
    assert failed.retryable is retryable


def test_the_log_of_a_run_is_read_like_its_messages() -> None:
    log: list[Any] = [["execution_start", {"prompt_id": "p"}], ["of_another_version", {}]]
    assert parse_log(log) == (Started("p"), UnknownMessage("of_another_version"))


@pytest.mark.parametrize("log", [{}, [[]], [["execution_start"]], [[1, {}]], ["x"]])
def test_a_log_of_another_shape_is_not_believed(log: object) -> None:
    with pytest.raises(UnexpectedAnswer):
        parse_log(log)


async def test_previews_that_wait_have_a_limit_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FRAME_BYTES_MAX <= MESSAGES_BYTES_MAX  # any frame fits into an empty inbox
    monkeypatch.setattr(messages, "MESSAGES_BYTES_MAX", 10)
    inbox, done = Inbox(), NodeDone("p", "9")
    first, second = (Preview("p", "9", "image/png", data) for data in (b"123456", b"7890"))
    inbox.put(first)
    inbox.put(Preview("p", "9", "image/png", b"12345"))  # the eleventh byte
    inbox.put(second)
    inbox.put(Progress("p", "9", 1, 2), "{}")
    inbox.put(done, "{}")  # is never dropped
    assert [await inbox.get(1) for _ in range(3)] == [first, second, done]
    large = Preview("p", "9", "image/png", b"1234567890")
    inbox.put(large)
    assert await inbox.get(1) == large
