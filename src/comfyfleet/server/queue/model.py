"""Defines the queue's data: dispatches, lanes, leases and waiters. Pure: it uses neither a clock
nor a database.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple
from uuid import UUID

from comfyfleet.api.admin import DispatchStatus as DispatchStatus
from comfyfleet.server.fleets.model import BackendOffer

ENDED = frozenset({DispatchStatus.COMPLETED, DispatchStatus.FAILED, DispatchStatus.CANCELLED})


class QueueLane(NamedTuple):
    """The combination of workflow, stage and provider that a worker must support to get a job. No
    field may be null or a wildcard.
    """

    workflow_id: int
    stage: str
    provider: str


@dataclass(frozen=True, slots=True)
class NewDispatch:
    tenant_id: UUID
    job_id: UUID
    lane: QueueLane
    priority: int = 0
    max_attempts: int = 3
    model_key: str | None = None  # the prompt's main model, which takes the most memory
    model_set: str | None = None  # a hash of all models that the prompt uses
    backend_affinity: str | None = None  # worker:ID or fleet:SLUG/STAGE
    preferred_worker_id: str | None = None  # the worker for which the job is briefly reserved


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A row of the queue."""

    id: int
    tenant_id: UUID
    job_id: UUID
    lane: QueueLane
    status: DispatchStatus
    priority: int
    rank: int
    attempts: int
    max_attempts: int
    requeues: int
    lease_number: int
    lease_token: UUID | None
    lease_expires_at: datetime | None
    worker_id: str | None
    not_before: datetime | None
    backend_affinity: str | None
    model_key: str | None
    model_set: str | None
    is_poisoned: bool
    cancel_requested: bool
    recall_requested: bool
    is_prefetched: bool
    duration_seconds: float | None
    last_error: str | None
    created_at: datetime
    queued_at: datetime
    leased_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    heard_at: datetime | None
    lost_leases: int  # number of leases that expired before the job had started

    @property
    def is_used_up(self) -> bool:
        """Whether the dispatch may not be leased again. The holder of its lease must then end it as
        failed.
        """
        return self.is_poisoned or self.attempts >= self.max_attempts


class WorkerLoad(NamedTuple):
    """The jobs that a worker holds, and the number of jobs that it runs concurrently."""

    fleet_id: int
    max_concurrency: int
    job_ids: frozenset[UUID]


class ActiveDispatch(NamedTuple):
    """The columns of an active dispatch that the reconcile sweep compares with its job."""

    id: int
    tenant_id: UUID
    job_id: UUID
    cancel_requested: bool


class EndedDispatch(NamedTuple):
    """The columns of an ended dispatch that decide whether it may be removed."""

    ended_at: datetime
    id: int
    tenant_id: UUID
    job_id: UUID


class DispatchLease(NamedTuple):
    """A worker's time-limited right to a dispatch."""

    dispatch_id: int
    tenant_id: UUID
    job_id: UUID
    lane: QueueLane
    worker_id: str
    token: UUID
    number: int  # increases with each lease, so that older leases can't change the tenant's row
    attempt: int
    expires_at: datetime
    is_prefetched: bool = False
    model_key: str | None = None
    model_set: str | None = None


@dataclass(frozen=True, slots=True)
class Waiter:
    """A worker that polls for a job, with all properties that the matcher considers."""

    worker_id: str
    lanes: frozenset[QueueLane]
    affinities: frozenset[str] = frozenset()  # worker:ID and fleet:SLUG/STAGE
    load: int = 0
    models_loaded: tuple[str, ...] = ()  # heavy models, most recently used first
    model_set: str | None = None
    free_gpu_memory_bytes: int = 0
    is_prefetch: bool = False  # whether the worker is busy and would run the job later
    # Whether no other live worker may run jobs in this worker's lanes. If so, the worker isn't
    # avoided after a failure.
    is_alone: bool = False
    # The hash of the worker's key. The claim checks it in the database, together with the worker's
    # approval, drain state and assignments. None means that the waiter isn't a fleet worker, so it
    # has no permissions to check.
    key_hash: str | None = None
    fleet_id: int | None = None
    tells_leases: bool = False  # whether its polls list the leases that it holds
    offer: BackendOffer | None = None  # node types and models of its backend; None if unknown
    lacking: frozenset[str] = frozenset()  # model sets that its backend can't run
    # The worker may get another lease if it holds at most this many. The claim checks this in the
    # database, so that a worker with several concurrent polls doesn't exceed its limit.
    held_max: int | None = None


class DispatchCandidate(NamedTuple):
    """A queued row for the matcher. It is a tuple for speed, because dozens of rows are read for
    each lease.
    """

    id: int
    lane: QueueLane
    priority: int
    rank: int
    queued_at: datetime
    model_key: str | None = None
    model_set: str | None = None
    backend_affinity: str | None = None
    avoid_worker_id: str | None = None
    avoid_until: datetime | None = None
    preferred_worker_id: str | None = None


class ExtendedLease(NamedTuple):
    """The result of a heartbeat that has extended a lease."""

    expires_at: datetime
    cancel_requested: bool
    recall_requested: bool
    tenant_id: UUID
    job_id: UUID
    begins: bool = False  # whether this heartbeat starts a prefetched job
    lease_number: int = 0
    attempts: int = 0
    worker_id: str | None = None


class RequeueReason(StrEnum):
    """The reason why a lease is returned to the queue. A backend failure uses up the attempt. An
    interruption doesn't count.
    """

    SPOT = "spot"
    REBALANCE = "rebalance"
    SHUTDOWN = "shutdown"
    DRAIN = "drain"
    RECALL = "recall"
    BACKEND_DOWN = "backend_down"
    BACKEND_FAULT = "backend_fault"
    OUT_OF_MEMORY = "out_of_memory"
    BACKEND_LACKS = "backend_lacks"
    DISK_FULL = "disk_full"  # the disk of the worker's machine
    OTHER = "other"  # a reason that the worker describes in its report
    # The following reasons are only used by the control plane.
    EXPIRED = "expired"
    REVOKED = "revoked"
    WAITER_GONE = "waiter_gone"
    PAYLOAD_DELAYED = "payload_delayed"

    @property
    def counts(self) -> bool:
        """Whether the attempt is used up. For an expired lease, this depends on whether the job had
        started.
        """
        return self in _BROKEN

    @property
    def is_interruption(self) -> bool:
        """Whether the requeue counts toward the limit after which a job is poisoned. Recalls and
        requeues of jobs that never reached their worker don't count.
        """
        return self not in _NOT_INTERRUPTIONS

    @property
    def prefers_others(self) -> bool:
        return self in _BROKEN or self in _ELSEWHERE


_BROKEN = frozenset(
    {RequeueReason.BACKEND_DOWN, RequeueReason.BACKEND_FAULT, RequeueReason.OUT_OF_MEMORY}
)
_ELSEWHERE = frozenset({RequeueReason.BACKEND_LACKS, RequeueReason.DISK_FULL})
_NOT_INTERRUPTIONS = frozenset(
    {RequeueReason.RECALL, RequeueReason.WAITER_GONE, RequeueReason.PAYLOAD_DELAYED}
)


class LaneDepth(NamedTuple):
    queued: int
    leased: int
    oldest_queued_at: datetime | None
