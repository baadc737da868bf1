"""Log lines for programs and for people."""

import json
import logging
import sys

from comfyfleet.cli.logs import ForPeople, JsonLine
from comfyfleet.kernel.tracing import bound


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "comfyfleet.x", "levelname": "INFO", "msg": message})
    vars(made).update(extra)
    return made


def test_a_line_carries_the_ids_of_what_was_being_done() -> None:
    with bound(request_id="r1"), bound(dispatch_id=12):
        line = JsonLine().format(record("leased\nfor good", worker="gpu-1"))
        told = ForPeople().format(record("leased"))
    entry = json.loads(line)
    assert "\n" not in line
    assert (entry["request_id"], entry["dispatch_id"], entry["worker"]) == ("r1", 12, "gpu-1")
    assert entry["message"] == "leased\nfor good"
    assert told.endswith("INFO leased  [request_id=r1 dispatch_id=12]")
    assert "request_id" not in json.loads(JsonLine().format(record("later")))


def test_an_exception_is_told_in_the_same_line() -> None:
    try:
        int("on purpose")
    except ValueError:
        entry = JsonLine().format(record("failed", exc_info=sys.exc_info()))
    assert "on purpose" in json.loads(entry)["exception"]
    assert "\n" not in entry
