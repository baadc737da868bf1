"""One thing that happened to a job."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple
from uuid import UUID


class EventKind(StrEnum):
    STATUS = "status"
    PROGRESS = "progress"
    OUTPUTS = "outputs"


class NewEvent(NamedTuple):
    tenant_id: UUID
    job_id: UUID
    kind: EventKind
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class JobEvent:
    id: int  # grows within a job: a reader goes on after the last one that it has
    tenant_id: UUID
    job_id: UUID
    kind: EventKind
    data: Mapping[str, Any]
    created_at: datetime
