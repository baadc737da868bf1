"""Provides in-memory caches for documents, converted prompts, queue depths and other values."""

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
    """Caches the most recently used documents. The document for a key never changes."""

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
    """Caches values that may be a few seconds old."""

    def __init__(self, fresh: timedelta) -> None:
        self._fresh = fresh
        self._kept: dict[Hashable, tuple[datetime, Value]] = {}

    async def get(
        self, key: Hashable, read: Callable[[], Awaitable[Value]], *, now: datetime
    ) -> Value:
        entry = self._kept.get(key)
        if entry is not None and timedelta() <= now - entry[0] < self._fresh:
            return entry[1]
        if entry is not None and timedelta() <= now - entry[0] < 2 * self._fresh:
            # Until this read has finished, other callers get the previous value.
            self._kept[key] = now, entry[1]
        elif len(self._kept) >= ANSWERS_KEPT_MAX:
            self._kept.clear()
        try:
            value = await read()
        except BaseException:
            self._kept.pop(key, None)
            raise
        self._kept[key] = now, value
        return value


class PromptCache:
    """Caches converted prompts by workflow. A prompt that depends on the date or on random values
    is converted again for each job.
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
        prompt = self._kept[key]
        return convert(chance) if prompt is None else prompt


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
    # Without a date, the conversion leaves date placeholders in the prompt, so that they can be
    # detected.
    prompt = convert(RandomSource(None, observed))
    return None if observed.was_used or DATE_PLACEHOLDER in repr(prompt) else prompt


QUEUE_DEPTH_TTL = timedelta(seconds=2)


class ActiveJobLimits(NamedTuple):
    """The maximum numbers of queued and running jobs of a user and of a tenant."""

    of_user: int
    of_tenant: int


# Limits so high that only the queue's own limits apply.
UNLIMITED = ActiveJobLimits(1_000_000, 1_000_000)


@dataclass
class _Count:
    queued: int
    at: datetime


@dataclass
class QueueDepthCache:
    """Caches counts of queued jobs, which may be a few seconds old. Before a job is refused, the
    jobs are counted again.
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
        cached = self._counts.get(whose)
        if cached is None or now - cached.at > QUEUE_DEPTH_TTL or cached.queued + more > most:
            cached = self._counts[whose] = _Count(await count(), now)
        if cached.queued + more > most:
            return False
        cached.queued += more
        return True


RUNS_KEPT_MAX = 20
KINDS_PER_USER_MAX, USERS_KEPT_MAX = 50, 2_000


class RunSeconds:
    """Records how long a user's runs of similar prompts took. Prompts are similar if they have the
    same workflow, node types and models. Other users' runs don't count, so that users can't affect
    each other's reservations.
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[Hashable, OrderedDict[str, deque[float]]] = OrderedDict()

    def note(self, tenant_id: UUID, spec: JobSpec, seconds: float) -> None:
        if not math.isfinite(seconds):
            return
        of_user = self._runs.setdefault((tenant_id, spec.user_id), OrderedDict())
        self._runs.move_to_end((tenant_id, spec.user_id))
        key = _run_key(spec)
        of_user.setdefault(key, deque(maxlen=RUNS_KEPT_MAX)).append(seconds)
        of_user.move_to_end(key)
        if len(of_user) > KINDS_PER_USER_MAX:
            of_user.popitem(last=False)
        if len(self._runs) > USERS_KEPT_MAX:
            self._runs.popitem(last=False)

    def longest(self, tenant_id: UUID, spec: JobSpec) -> float | None:
        """Returns the duration of the longest recent run in seconds, or None if there was none."""
        of_user = self._runs.get((tenant_id, spec.user_id))
        return max(of_user.get(_run_key(spec), ()), default=None) if of_user else None


def _run_key(spec: JobSpec) -> str:
    types = sorted({str(node.get("class_type")) for node in spec.prompt.values()})
    content = json.dumps([spec.workflow_id, types, spec.model_set])
    return hashlib.sha256(content.encode()).hexdigest()


READS_AT_ONCE_MAX = 32
LIVE_WORKERS_TTL = timedelta(seconds=2)
SHORTAGE_TTL = timedelta(seconds=2)
RUN_TERMS_TTL = timedelta(seconds=2)


@dataclass(frozen=True)
class JobCaches:
    """This process's caches. They can be cleared at any time, because all values can be read
    again.
    """

    queue_depth: QueueDepthCache = field(default_factory=QueueDepthCache)
    documents: DocumentCache = field(default_factory=DocumentCache)
    prompts: PromptCache = field(default_factory=PromptCache)
    progress: ProgressCache = field(default_factory=ProgressCache)
    eligibility: EligibilityCache = field(default_factory=EligibilityCache)
    object_infos: ObjectInfoCache = field(default_factory=ObjectInfoCache)
    # Caches of the gateway, whose types this package must not import, because it is a lower layer.
    gateway: dict[str, Any] = field(default_factory=dict)
    run_seconds: RunSeconds = field(default_factory=RunSeconds)
    # Slugs of workflows for which operators were warned that results lose their C2PA manifest.
    lost_manifests: set[str] = field(default_factory=set)
    effect_slugs: dict[UUID, str] = field(default_factory=dict)  # a slug never changes
    # The reason why no worker can run a kind of job, or None if a worker can.
    shortages: TtlCache[Shortage | None] = field(default_factory=lambda: TtlCache(SHORTAGE_TTL))
    # Run terms by workflow and effect. Values that are a few seconds old do no harm: a leased job
    # keeps its terms anyway, and a delivery reads the current ones from the database.
    run_terms: TtlCache[RunTerms] = field(default_factory=lambda: TtlCache(RUN_TERMS_TTL))


@dataclass(frozen=True)
class PollLimits:
    """The limits and caches for workers' polls that wait in this process."""

    # Limits how many polls read the database at the same time. All waiting polls may wake at the
    # same moment.
    reads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(READS_AT_ONCE_MAX))
    waiting: Counter[str] = field(default_factory=Counter)  # number of waiting polls by worker
    # Up to two live workers for each set of lanes. Two are enough to tell whether a worker is
    # alone.
    live_workers: TtlCache[frozenset[str]] = field(
        default_factory=lambda: TtlCache(LIVE_WORKERS_TTL)
    )
    # Whether maintenance mode is on. If so, polls return that reason and no job.
    maintenance: TtlCache[bool] = field(default_factory=lambda: TtlCache(timedelta(seconds=1)))
