"""In-memory caches: documents, converted prompts, answers that may be seconds old, and queue depths."""

import asyncio
import hashlib
import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import UUID

from comfyfleet.server.catalog.model import RunTerms
from comfyfleet.server.catalog.payload import RandomSource
from comfyfleet.server.fleets.eligibility import EligibilityCache
from comfyfleet.server.fleets.object_info import ObjectInfoCache
from comfyfleet.server.jobs.model import JobSpec, Shortage
from comfyfleet.server.jobs.progress import ProgressCache

Value = TypeVar("Value")
DOCUMENTS_KEPT_MAX = 64
PROMPTS_KEPT_MAX = 256
ANSWERS_KEPT_MAX = 10_000
DATE_PLACEHOLDER = "%date"


class DocumentCache:
    """The most recently used documents. A document never changes under its key."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Mapping[str, Any]] = OrderedDict()

    async def get(
        self, key: str, read: Callable[[], Awaitable[Mapping[str, Any]]]
    ) -> Mapping[str, Any]:
        if key not in self._kept:
            self._kept[key] = await read()
            if len(self._kept) > DOCUMENTS_KEPT_MAX:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]


class TtlCache(Generic[Value]):
    """Values that may be a few seconds old."""

    def __init__(self, fresh: timedelta) -> None:
        self._fresh = fresh
        self._kept: dict[Hashable, tuple[datetime, Value]] = {}

    async def get(
        self, key: Hashable, read: Callable[[], Awaitable[Value]], *, now: datetime
    ) -> Value:
        kept = self._kept.get(key)
        if kept is not None and timedelta() <= now - kept[0] < self._fresh:
            return kept[1]
        if len(self._kept) >= ANSWERS_KEPT_MAX:
            self._kept.clear()
        value = await read()
        self._kept[key] = now, value
        return value


class PromptCache:
    """Converted prompts by workflow; one that depends on the date or on chance is converted for
    each job.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Mapping[str, Any] | None] = OrderedDict()

    def get(
        self, key: str, convert: Callable[[RandomSource], Mapping[str, Any]], chance: RandomSource
    ) -> Mapping[str, Any]:
        """Returns the shared prompt; callers must not change it."""
        if key not in self._kept:
            self._kept[key] = _convert_if_constant(convert)
            if len(self._kept) > PROMPTS_KEPT_MAX:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        kept = self._kept[key]
        return convert(chance) if kept is None else kept


class _ObservedRandom:
    """A random source that records whether it was used."""

    was_used = False

    def random(self) -> float:
        self.was_used = True
        return 0.0


def _convert_if_constant(
    convert: Callable[[RandomSource], Mapping[str, Any]],
) -> Mapping[str, Any] | None:
    observed = _ObservedRandom()
    # Without a date its patterns stay as they are, and can be seen.
    made = convert(RandomSource(None, observed))
    return None if observed.was_used or DATE_PLACEHOLDER in repr(made) else made


QUEUE_DEPTH_TTL = timedelta(seconds=2)


class ActiveJobLimits(NamedTuple):
    """How many jobs may be queued or running at once."""

    of_user: int
    of_tenant: int


# Where the queue's own limits are enough.
UNLIMITED = ActiveJobLimits(1_000_000, 1_000_000)


@dataclass
class _Count:
    queued: int
    at: datetime


@dataclass
class QueueDepthCache:
    """Counts of queued jobs. They may be a few seconds old, but a refusal always rests on a fresh
    count.
    """

    _counts: dict[UUID | None, _Count] = field(default_factory=dict)

    def forget(self) -> None:
        self._counts.clear()

    async def has_room(
        self,
        whose: UUID | None,
        more: int,
        most: int,
        *,
        count: Callable[[], Awaitable[int]],
        now: datetime,
    ) -> bool:
        kept = self._counts.get(whose)
        if kept is None or now - kept.at > QUEUE_DEPTH_TTL or kept.queued + more > most:
            kept = self._counts[whose] = _Count(await count(), now)
        if kept.queued + more > most:
            return False
        kept.queued += more
        return True


RUNS_KEPT_MAX = 20
KINDS_PER_USER_MAX, USERS_KEPT_MAX = 50, 2_000


class RunSeconds:
    """How long a user's runs of similar prompts took: of one workflow, with the same node types and
    models. What other users run changes nothing, so that they can't change what a user must reserve.
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[Hashable, OrderedDict[str, deque[float]]] = OrderedDict()

    def note(self, tenant_id: UUID, asked: JobSpec, seconds: float) -> None:
        if not math.isfinite(seconds):
            return
        of_user = self._runs.setdefault((tenant_id, asked.user_id), OrderedDict())
        self._runs.move_to_end((tenant_id, asked.user_id))
        key = _run_key(asked)
        of_user.setdefault(key, deque(maxlen=RUNS_KEPT_MAX)).append(seconds)
        of_user.move_to_end(key)
        if len(of_user) > KINDS_PER_USER_MAX:
            of_user.popitem(last=False)
        if len(self._runs) > USERS_KEPT_MAX:
            self._runs.popitem(last=False)

    def longest(self, tenant_id: UUID, asked: JobSpec) -> float | None:
        """Returns the longest of the last runs; None if there was none yet."""
        of_user = self._runs.get((tenant_id, asked.user_id))
        return max(of_user.get(_run_key(asked), ()), default=None) if of_user else None


def _run_key(asked: JobSpec) -> str:
    types = sorted({str(node.get("class_type")) for node in asked.prompt.values()})
    said = json.dumps([asked.workflow_id, types, asked.model_set])
    return hashlib.sha256(said.encode()).hexdigest()


READS_AT_ONCE_MAX = 32
LIVE_WORKERS_TTL = timedelta(seconds=2)
SHORTAGE_TTL = timedelta(seconds=2)
RUN_TERMS_TTL = timedelta(seconds=2)


@dataclass(frozen=True)
class JobCaches:
    """The caches of one process. All of it can be read again."""

    queue_depth: QueueDepthCache = field(default_factory=QueueDepthCache)
    documents: DocumentCache = field(default_factory=DocumentCache)
    prompts: PromptCache = field(default_factory=PromptCache)
    progress: ProgressCache = field(default_factory=ProgressCache)
    eligibility: EligibilityCache = field(default_factory=EligibilityCache)
    object_infos: ObjectInfoCache = field(default_factory=ObjectInfoCache)
    # What the gateway keeps, which is above this package.
    gateway: dict[str, Any] = field(default_factory=dict)
    run_seconds: RunSeconds = field(default_factory=RunSeconds)
    # Workflows whose operators were warned that a C2PA manifest is removed.
    lost_manifests: set[str] = field(default_factory=set)
    effect_slugs: dict[UUID, str] = field(default_factory=dict)  # they never change
    # Whether nobody can run jobs of a kind.
    shortages: TtlCache[Shortage | None] = field(default_factory=lambda: TtlCache(SHORTAGE_TTL))
    # By workflow and effect. They are no orders: a job that was handed out before keeps them, too, and
    # what a delivery goes by is read then.
    run_terms: TtlCache[RunTerms] = field(default_factory=lambda: TtlCache(RUN_TERMS_TTL))


@dataclass(frozen=True)
class PollLimits:
    """Limits of the workers' polls that wait in this process."""

    # All who wait may be woken at once; only so many are then looked at side by side.
    reads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(READS_AT_ONCE_MAX))
    waiting: Counter[str] = field(default_factory=Counter)  # how many, by worker
    # Two workers who could run jobs of some lanes, or all that there are.
    live_workers: TtlCache[frozenset[str]] = field(
        default_factory=lambda: TtlCache(LIVE_WORKERS_TTL)
    )
    # Whether maintenance is on, for the reason of waits that end without a job.
    maintenance: TtlCache[bool] = field(default_factory=lambda: TtlCache(timedelta(seconds=1)))
