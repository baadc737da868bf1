"""In-memory caches for documents, converted prompts, values that may be seconds old, and queue
depths.
"""

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
    """Caches the most recently used documents. The document of a key never changes."""

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
        if len(self._kept) >= ANSWERS_KEPT_MAX:
            self._kept.clear()
        value = await read()
        self._kept[key] = now, value
        return value


class PromptCache:
    """Caches converted prompts by workflow. A prompt that depends on the date or on random values
    is converted for each job.
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
    # This random source has no date, so date placeholders stay in the prompt and can be found.
    prompt = convert(RandomSource(None, observed))
    return None if observed.was_used or DATE_PLACEHOLDER in repr(prompt) else prompt


QUEUE_DEPTH_TTL = timedelta(seconds=2)


class ActiveJobLimits(NamedTuple):
    """How many jobs may be queued or running at once."""

    of_user: int
    of_tenant: int


# For callers that rely on the queue's own limits.
UNLIMITED = ActiveJobLimits(1_000_000, 1_000_000)


@dataclass
class _Count:
    queued: int
    at: datetime


@dataclass
class QueueDepthCache:
    """Caches counts of queued jobs. They may be a few seconds old, but a refusal is always based on
    a fresh count.
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
    """Records how long a user's runs of similar prompts took. Similar prompts have the same
    workflow, node types and models. Other users' runs don't count, so that nobody can change what
    another user must reserve.
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
        """Returns the longest of the last runs in seconds, or None if there was no run yet."""
        of_user = self._runs.get((tenant_id, asked.user_id))
        return max(of_user.get(_run_key(asked), ()), default=None) if of_user else None


def _run_key(asked: JobSpec) -> str:
    types = sorted({str(node.get("class_type")) for node in asked.prompt.values()})
    content = json.dumps([asked.workflow_id, types, asked.model_set])
    return hashlib.sha256(content.encode()).hexdigest()


READS_AT_ONCE_MAX = 32
LIVE_WORKERS_TTL = timedelta(seconds=2)
SHORTAGE_TTL = timedelta(seconds=2)
RUN_TERMS_TTL = timedelta(seconds=2)


@dataclass(frozen=True)
class JobCaches:
    """The caches of one process. Everything in them can be read again."""

    queue_depth: QueueDepthCache = field(default_factory=QueueDepthCache)
    documents: DocumentCache = field(default_factory=DocumentCache)
    prompts: PromptCache = field(default_factory=PromptCache)
    progress: ProgressCache = field(default_factory=ProgressCache)
    eligibility: EligibilityCache = field(default_factory=EligibilityCache)
    object_infos: ObjectInfoCache = field(default_factory=ObjectInfoCache)
    # Caches of the gateway, which is a higher layer than this package.
    gateway: dict[str, Any] = field(default_factory=dict)
    run_seconds: RunSeconds = field(default_factory=RunSeconds)
    # Workflows whose operators were warned that a C2PA manifest is removed.
    lost_manifests: set[str] = field(default_factory=set)
    effect_slugs: dict[UUID, str] = field(default_factory=dict)  # a slug never changes
    # Why no worker can run jobs of a kind, or None if a worker can.
    shortages: TtlCache[Shortage | None] = field(default_factory=lambda: TtlCache(SHORTAGE_TTL))
    # Run terms by workflow and effect. A job that was leased before a change keeps its old terms,
    # and a delivery reads the current ones, so old values do no harm.
    run_terms: TtlCache[RunTerms] = field(default_factory=lambda: TtlCache(RUN_TERMS_TTL))


@dataclass(frozen=True)
class PollLimits:
    """Limits of the workers' polls that wait in this process."""

    # All waiting polls may be woken at once. This limits how many of them read the database at the
    # same time.
    reads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(READS_AT_ONCE_MAX))
    waiting: Counter[str] = field(default_factory=Counter)  # number of waiting polls by worker
    # Up to two live workers that could run jobs of the given lanes, or all live workers.
    live_workers: TtlCache[frozenset[str]] = field(
        default_factory=lambda: TtlCache(LIVE_WORKERS_TTL)
    )
    # Whether maintenance is on. It explains polls that end without a job.
    maintenance: TtlCache[bool] = field(default_factory=lambda: TtlCache(timedelta(seconds=1)))
