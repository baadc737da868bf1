"""Log lines for programs and for people."""

import asyncio
import io
import json
import logging
import sys
import weakref
from dataclasses import replace

from rich.console import Console

from comfyfleet.cli.context import process_context
from comfyfleet.cli.logs import (
    LINES_MAX,
    WRITE_BYTES_MAX,
    BufferedLines,
    ConsoleFormatter,
    JsonFormatter,
)
from comfyfleet.log_context import bind_ids


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "comfyfleet.x", "levelname": "INFO", "msg": message})
    vars(made).update(extra)
    return made


def test_a_line_carries_the_ids_of_what_was_being_done() -> None:
    with bind_ids(request_id="r1"), bind_ids(dispatch_id=12):
        line = JsonFormatter().format(record("leased\nfor good", worker="gpu-1"))
        told = ConsoleFormatter().format(record("leased"))
    entry = json.loads(line)
    assert "\n" not in line
    assert (entry["request_id"], entry["dispatch_id"], entry["worker"]) == ("r1", 12, "gpu-1")
    assert entry["message"] == "leased\nfor good"
    assert told.endswith("INFO leased  [request_id=r1 dispatch_id=12]")
    assert "request_id" not in json.loads(JsonFormatter().format(record("later")))


def test_an_exception_is_told_in_the_same_line() -> None:
    try:
        int("on purpose")
    except ValueError:
        entry = JsonFormatter().format(record("failed", exc_info=sys.exc_info()))
    assert "on purpose" in json.loads(entry)["exception"]
    assert "\n" not in entry


class Stream(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Event()

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


def lines_of(stream: io.StringIO) -> list[str]:
    return [json.loads(line)["message"] for line in stream.getvalue().splitlines()]


def said(handler: logging.Handler, message: str, level: int = logging.INFO) -> None:
    handler.handle(logging.makeLogRecord({"msg": message, "levelno": level}))


def handler_on(stream: io.StringIO) -> BufferedLines:
    handler = BufferedLines(stream)
    handler.setFormatter(JsonFormatter())
    return handler


async def test_lines_of_one_moment_are_written_together_with_the_ids_of_each() -> None:
    stream = Stream()
    handler = handler_on(stream)
    for number in range(3):
        with bind_ids(request_id=f"r{number}"):
            said(handler, f"line {number}")
    assert stream.getvalue() == ""
    await asyncio.wait_for(stream.written.wait(), 10)
    assert lines_of(stream) == ["line 0", "line 1", "line 2"]
    assert [json.loads(each)["request_id"] for each in stream.getvalue().splitlines()] == [
        "r0",
        "r1",
        "r2",
    ]


async def test_a_warning_is_written_at_once_behind_what_came_before() -> None:
    stream = io.StringIO()
    handler = handler_on(stream)
    said(handler, "before")
    said(handler, "odd", logging.WARNING)
    assert lines_of(stream) == ["before", "odd"]


async def test_nothing_is_kept_back_when_the_process_ends_or_lines_are_many() -> None:
    stream = io.StringIO()
    handler = handler_on(stream)
    for number in range(LINES_MAX):
        said(handler, str(number))
    assert len(lines_of(stream)) == LINES_MAX
    said(handler, "last")
    logging.shutdown([weakref.ref(handler)])
    assert lines_of(stream)[-1] == "last"


def test_without_an_event_loop_a_line_is_written_at_once() -> None:
    stream = io.StringIO()
    said(handler_on(stream), "early")
    assert lines_of(stream) == ["early"]


class Writes(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def write(self, text: str) -> int:
        self.texts.append(text)
        return super().write(text)


async def test_no_write_is_longer_than_what_a_pipe_of_several_processes_takes_whole() -> None:
    stream = Writes()
    handler = handler_on(stream)
    for number in range(100):
        said(handler, f"{number} \u00e9\udc80" * 40)
    said(handler, "long " * WRITE_BYTES_MAX)
    handler.flush()
    assert len(lines_of(stream)) == 101
    assert all(each.endswith("\n") for each in stream.texts)
    *short, long = stream.texts
    assert len(short) < 40
    assert all(len(each.encode("utf-8", "backslashreplace")) <= WRITE_BYTES_MAX for each in short)
    assert long.count("\n") == 1, "a line longer than that has a write of its own"


async def test_what_a_command_says_to_people_stands_behind_what_it_has_logged() -> None:
    stream = io.StringIO()
    context = replace(process_context(), err=Console(file=stream, width=80))
    handler = handler_on(stream)
    logging.getLogger().addHandler(handler)
    try:
        said(handler, "stopping")
        context.fail("register was answered 401")
    finally:
        logging.getLogger().removeHandler(handler)
    first, last = stream.getvalue().splitlines()
    assert "stopping" in first
    assert last == "error: register was answered 401"
