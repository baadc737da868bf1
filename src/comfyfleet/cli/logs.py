"""Logs of long-running commands: readable text on a terminal, JSON elsewhere."""

import asyncio
import json
import logging
import select
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import IO, Annotated, Any, Literal, TypeAlias

from cyclopts import Parameter
from rich.console import Console

from comfyfleet.log_context import current_ids

LogLevel: TypeAlias = Annotated[
    Literal["debug", "info", "warning", "error"],
    Parameter(
        help="The level of messages on stderr, which are text on a terminal and JSON lines otherwise."
    ),
]
ACCESS = "comfyfleet.access"
DELAY_SECONDS = 0.05
LINES_MAX = 1_000
# The size up to which writes to a pipe are atomic.
WRITE_BYTES_MAX: int = getattr(select, "PIPE_BUF", 512)
# Fields of every record. Others were passed in `extra`.
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# Messages of these loggers below warning level are only useful to their developers.
_NOISY_LOGGERS = (
    "aiosqlite", "alembic", "asyncio", "boto3", "botocore", "httpcore", "httpx", "sqlalchemy",
    "uvicorn", "websockets",
)  # fmt: skip


def set_up_logs(level: str, err: Console) -> None:
    handler = logging.StreamHandler(err.file) if err.is_terminal else BufferedLines(err.file)
    handler.setFormatter(ConsoleFormatter() if err.is_terminal else JsonFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


class BufferedLines(logging.StreamHandler[IO[str]]):
    """Briefly delays lines below warning level and writes several at a time, because each write
    wakes the reader.

    A warning is written immediately, with all lines before it. So are messages from a thread
    without an event loop. The remaining lines are written at exit. Only a kill can lose lines, and
    only the most recent ones."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(stream)
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(self.format(record) + self.terminator)
            if record.levelno >= logging.WARNING or len(self._lines) >= LINES_MAX:
                self.flush()
            elif self._timer is None:
                self._start()
        except RecursionError:
            raise
        except Exception:  # noqa: BLE001 — as the handlers of the standard library do
            self.handleError(record)

    def _start(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.flush()
        else:
            self._timer = loop.call_later(DELAY_SECONDS, self.flush)

    def flush(self) -> None:
        with self.lock or nullcontext():
            lines, self._lines, self._timer = self._lines, [], None
            for text in _together(lines):
                self.stream.write(text)
                super().flush()
            super().flush()


def _together(lines: Iterable[str]) -> Iterator[str]:
    """Combines lines into writes of limited size. Several processes may write to the same pipe, and
    larger writes could be interleaved."""
    some: list[str] = []
    size = 0
    for line in lines:
        more = len(line.encode("utf-8", "backslashreplace"))
        if some and size + more > WRITE_BYTES_MAX:
            yield "".join(some)
            some, size = [], 0
        some.append(line)
        size += more
    if some:
        yield "".join(some)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object per line, with the ids of the current operation."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_ids(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


class ConsoleFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s%(ids)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        # An access log line already contains its extra fields in the message.
        ids_by_name = current_ids() if record.name == ACCESS else _ids(record)
        ids = " ".join(f"{name}={value}" for name, value in ids_by_name.items())
        record.ids = f"  [{ids}]" if ids else ""
        return super().format(record)


def _ids(record: logging.LogRecord) -> dict[str, Any]:
    extra = {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
    return {**current_ids(), **extra}
