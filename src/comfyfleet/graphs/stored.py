"""Graphs and runs as they are kept. Pure; a run's executions are in `runs`."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.graphs.runs import Run, RunError, RunStatus

# Of a run whose time is up. It has lost what it was made of, so that nothing changes it any more.
EXPIRED_REVISION = -1


@dataclass(frozen=True, slots=True)
class StoredGraph:
    id: UUID
    tenant_id: UUID
    user_id: UUID
    name: str
    version: int
    document: Mapping[str, Any]
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Head:
    """All of a run but its executions."""

    id: UUID
    tenant_id: UUID
    user_id: UUID
    graph_id: UUID
    graph_version: int
    snapshot: Mapping[str, Any]
    inputs: Mapping[str, Any]
    max_tokens: int | None
    created_at: datetime
    status: RunStatus = RunStatus.PENDING
    revision: int = 0
    tokens: int = 0
    error: RunError | None = None
    outputs: Mapping[str, Any] | None = None
    changed_at: datetime | None = None
    ended_at: datetime | None = None

    @property
    def is_expired(self) -> bool:
        return self.revision == EXPIRED_REVISION

    @property
    def run(self) -> Run:
        return Run(
            self.id,
            self.inputs,
            self.max_tokens,
            self.status,
            tokens=self.tokens,
            error=self.error,
            outputs=self.outputs,
        )


@dataclass(frozen=True, slots=True)
class GraphEntry:
    """A graph in a list: without its document."""

    id: UUID
    user_id: UUID
    name: str
    version: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class RunEntry:
    """A run in a list: without its snapshot, inputs, outputs and executions."""

    id: UUID
    graph_id: UUID
    graph_version: int
    name: str  # of its graph, as that is called now
    status: RunStatus
    tokens: int
    max_tokens: int | None
    error: RunError | None
    created_at: datetime
    ended_at: datetime | None
