"""Logs of the commands that serve: lines for people on a terminal, JSON lines anywhere else."""

import json
import logging
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeAlias

from cyclopts import Parameter
from rich.console import Console

from comfyfleet.kernel.tracing import current

LogLevel: TypeAlias = Annotated[
    Literal["debug", "info", "warning", "error"],
    Parameter(help="What goes to stderr: lines on a terminal, JSON lines anywhere else."),
]
# What every record has; the rest was given with `extra`.
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# What they say below a warning, only their authors want to know.
_TALKATIVE = (
    "aiosqlite", "alembic", "asyncio", "boto3", "botocore", "httpcore", "httpx", "sqlalchemy",
    "uvicorn", "websockets",
)  # fmt: skip


def set_up_logs(level: str, err: Console) -> None:
    handler = logging.StreamHandler(err.file)
    handler.setFormatter(ForPeople() if err.is_terminal else JsonLine())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


class JsonLine(logging.Formatter):
    """One object per line, with the ids of what was being done."""

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


class ForPeople(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s%(ids)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        ids = " ".join(f"{name}={value}" for name, value in _ids(record).items())
        record.ids = f"  [{ids}]" if ids else ""
        return super().format(record)


def _ids(record: logging.LogRecord) -> dict[str, Any]:
    given = {name: value for name, value in vars(record).items() if name not in _USUAL}
    return {**current(), **given}
