"""What a customer reads when something went wrong."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.server.jobs.user_messages import (
    MESSAGE_CHARACTERS_MAX,
    OUT_OF_MEMORY,
    UNAVAILABLE,
    UNKNOWN,
    to_user_message,
)

TRACEBACK = """Traceback (most recent call last):
  File "execution.py", line 12, in run
    raise ValueError("no")
torch.OutOfMemoryError: Allocation on device would exceed memory
"""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ({"exception_message": "Allocation failed", "traceback": ["…"]}, "Allocation failed"),
        (json.dumps({"exception_message": " Two\nlines "}), "Two lines"),
        ({"error": {"error_message": "inner"}, "node_id": "3"}, "inner"),
        ({"error_message": "outer", "inner": {"exception_message": "first"}}, "first"),
        ('RuntimeError: {"exception_message": "deep"}', "deep"),
        (
            'ValueError: {no}, see\n[{"a": {"error_message": "it can\'t be read"}}] end',
            "it can't be read",
        ),
        ('RuntimeError: {"exception_message": "secret path /home/bob"}', UNKNOWN),
        (TRACEBACK, "Allocation on device would exceed memory"),
        ("worker said: {'message': 'no such file'} and stopped", "no such file"),
        ("\n\n---\nError: disk full\n", "disk full"),
        ("the engine stopped\nmore", "the engine stopped"),
        ('Traceback (most recent call last):\n  File "a.py", line 1\n', UNKNOWN),
        ("", UNKNOWN),
        ({}, UNKNOWN),
        ({"exception_message": ""}, UNKNOWN),
        ("===\n***", UNKNOWN),
        ("RuntimeError: secret path /home/bob AKIAIOSFODNN7EXAMPLE", UNKNOWN),
        ("http://user:pw@127.0.0.1:8188/prompt?token=abc failed", UNKNOWN),
        ("full_output_folder: /etc output_dir: /data/engine/output", UNKNOWN),
        ("[Errno 36] File name too long: '/data/x'", UNKNOWN),
        ("OSError: db-1.internal is down", UNKNOWN),
        ("worker gpu-7 said no", UNKNOWN),
        ("RuntimeError: C:\\Comfy broke", UNKNOWN),
        (
            "Prompt refused: input ckpt_name: Value not in list; received 'tiny_a.safetensors'; "
            "allowed: ['sd15_a.safetensors']",
            UNAVAILABLE,
        ),
        ({"type": "value_not_in_list", "details": "model.gguf"}, UNAVAILABLE),
        ({"error": {"type": "missing_node_type", "message": "MyNode"}}, UNAVAILABLE),
        ("torch.OutOfMemoryError: CUDA out of memory on /dev/x", OUT_OF_MEMORY),
        ("sizes of tensors must match: 64 and 32", "sizes of tensors must match: 64 and 32"),
    ],
)
def test_the_message_is_what_a_person_can_use(error: str | dict[str, object], message: str) -> None:
    assert to_user_message(error).message == message


def test_the_raw_text_is_kept_for_operators() -> None:
    assert to_user_message(TRACEBACK).raw == TRACEBACK
    assert json.loads(to_user_message({"exception_message": "é"}).raw or "") == {
        "exception_message": "é"
    }


@given(st.one_of(st.text(), st.dictionaries(st.text(), st.text() | st.lists(st.text()))))
def test_any_error_becomes_one_short_line(error: str | dict[str, object]) -> None:
    message = to_user_message(error).message
    assert message.strip()
    assert "\n" not in message
    assert len(message) <= MESSAGE_CHARACTERS_MAX
