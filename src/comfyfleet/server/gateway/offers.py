"""Builds the offer for a user's prompts: the backends of the fleets that accept them, and the node
types that the user may use.
"""

import asyncio
import gzip
import hashlib
import mimetypes
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Generic, TypeAlias, TypeVar

from comfyfleet.api.admin import FleetPrompts
from comfyfleet.protocol.http import json_text
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import BackendKind, Fleet
from comfyfleet.server.gateway.freshness import freshness_of
from comfyfleet.server.gateway.policy import NodePolicy, core_nodes, policy_of
from comfyfleet.server.run_log import service as run_log
from comfyfleet.server.tenants.model import Caller

# Node types by name, in the format of `/object_info`.
ObjectInfo: TypeAlias = Mapping[str, Mapping[str, Any]]
# A user's own files, grouped by the kind of upload.
FilesByKind: TypeAlias = Mapping[str, Sequence[str]]

UPLOADS = {
    "image_upload": "image",
    "video_upload": "video",
    "audio_upload": "audio",
    "animated_image_upload": "image",
    "file_upload": "3D",
}
FILE = "file"  # The kind of an input that accepts any type of file.
IMAGE_FOLDER = "image_folder"  # The option of inputs that list results instead of uploads.
MODEL_TYPES_3D = frozenset({"gltf", "glb", "obj", "fbx", "stl", "spz", "splat", "ply", "ksplat"})
# Inputs that ComfyUI's own nodes validate themselves, by node type. The browser fills in the
# choices of these inputs, so object_info doesn't list them.
UNLISTED_CHOICES = {"CustomCombo": ("choice",)}
COMBO = "COMBO"
_MODEL = re.compile(r"\.(safetensors|sft|ckpt|pt|pth|bin|gguf|onnx|pkl)$", re.IGNORECASE)
_PATH = re.compile(r"[/\\]|\.\.|^[A-Za-z]:")


def upload_inputs(info: Mapping[str, Any]) -> dict[str, str]:
    """Returns the inputs of a node type that accept an upload, with the kind of file."""
    kinds: dict[str, str] = {}
    for group in ("required", "optional"):
        for name, spec in _inputs(info, group).items():
            kind = _upload_kind(_options(spec))
            if kind is not None:
                kinds[name] = kind
    return kinds


def _upload_kind(options: Mapping[str, Any]) -> str | None:
    marks = [key for key, value in options.items() if key.endswith("upload") and value]
    known = [UPLOADS[mark] for mark in marks if mark in UPLOADS]
    if known:
        return known[0]
    return FILE if marks or options.get(IMAGE_FOLDER) else None


def _inputs(info: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    groups = info.get("input")
    inputs = groups.get(group) if isinstance(groups, Mapping) else None
    return inputs if isinstance(inputs, Mapping) else {}


def input_spec(info: Mapping[str, Any], name: str) -> Any:
    """Returns the declaration of a node type's input, or None if the input isn't declared."""
    return _inputs(info, "required").get(name) or _inputs(info, "optional").get(name)


def _options(spec: Any) -> Mapping[str, Any]:
    is_declared = isinstance(spec, list) and len(spec) > 1 and isinstance(spec[1], Mapping)
    return spec[1] if is_declared else {}


def by_kind(names: Iterable[str]) -> dict[str, list[str]]:
    """Groups filenames by the kinds of inputs that list them, and keeps their order. As in ComfyUI,
    files in subfolders are left out.
    """
    names_by_kind: dict[str, list[str]] = {}
    for name in names:
        if "/" in name:
            continue
        for kind in _kinds_of(name):
            names_by_kind.setdefault(kind, []).append(name)
    return names_by_kind


def _kinds_of(name: str) -> Iterator[str]:
    yield FILE
    if name.rpartition(".")[2].lower() in MODEL_TYPES_3D:
        yield "3D"
    media = (mimetypes.guess_type(name)[0] or "").partition("/")[0]
    if media in ("image", "video", "audio"):
        yield media
    if media == "video":
        yield "audio"


@dataclass(frozen=True)
class OfferedNode:
    """A backend's node type. `files` contains the user's own files, by input name."""

    name: str
    info: Mapping[str, Any]
    # The kinds of files that inputs accept (image, video, audio …), by input name.
    uploads: Mapping[str, str] = field(default_factory=dict)
    files: FilesByKind = field(default_factory=dict)
    # A custom node's VALIDATE_INPUTS function can waive the checks of lists, ranges and types. This
    # isn't visible in object_info, so the backend must decide.
    may_waive_types: bool = False

    def may_waive(self, value: Any) -> bool:
        """Checks whether the backend may decide if a value is valid. Paths and model names must
        always be among the listed choices, because a path may lead to another user's file, and a
        prompt with an unknown model would wait forever.
        """
        if not self.may_waive_types:
            return False
        return not isinstance(value, str) or not (_PATH.search(value) or _MODEL.search(value))

    @property
    def is_output(self) -> bool:
        return bool(self.info.get("output_node"))

    @property
    def validated(self) -> Sequence[str]:
        return (*self.uploads, *UNLISTED_CHOICES.get(self.name, ()))

    def entry(self) -> dict[str, Any]:
        """Returns the node type's entry in `/object_info` for this user."""
        return with_choices(self.info, self.files)

    def declared_inputs(self) -> Mapping[str, Any]:
        inputs: Mapping[str, Any] = self.entry()["input"]
        return inputs

    def check_values(self, values: Mapping[str, Any]) -> str | None:
        """Checks the values of upload inputs and returns an error message, or None if they are
        valid. Links and nested values are refused, because only the backend can resolve them, and
        they may lead to the file of another job.
        """
        for name, kind in self.uploads.items():
            value = values.get(name)
            if name not in values or (value == "" and not self._is_choice(name)):
                continue
            if not isinstance(value, str):
                return f"Invalid {kind} file: the input must contain its name as a string"
            if value not in self.files.get(name, ()):
                return f"Invalid {kind} file: {value}"
        return None

    def _is_choice(self, name: str) -> bool:
        spec = input_spec(self.info, name)
        return isinstance(spec[0], list) or spec[0] == COMBO


class OfferedNodes(Mapping[str, OfferedNode]):
    """The node types of an object_info, combined with a user's files. Entries are created on
    access.

    If `is_lenient` is set, the backend may waive the declared checks of custom nodes.
    """

    def __init__(
        self, object_info: ObjectInfo, files: FilesByKind, *, is_lenient: bool = False
    ) -> None:
        self._info = object_info
        self._files = files
        self._is_lenient = is_lenient
        self._made: dict[str, OfferedNode] = {}

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._info

    def __getitem__(self, name: str) -> OfferedNode:
        node = self._made.get(name)
        if node is None:
            info = self._info[name]
            uploads = upload_inputs(info)
            files = {input_name: self._files.get(kind, ()) for input_name, kind in uploads.items()}
            may_waive = self._is_lenient and name not in core_nodes()
            node = self._made[name] = OfferedNode(name, info, uploads, files, may_waive)
        return node

    def __iter__(self) -> Iterator[str]:
        return iter(self._info)

    def __len__(self) -> int:
        return len(self._info)


def with_choices(info: Mapping[str, Any], files: FilesByKind) -> dict[str, Any]:
    """Returns an entry of object_info with the choices of some inputs replaced by file names.
    `files` contains the file names by input.
    """
    declared = info.get("input")
    inputs = declared if isinstance(declared, Mapping) else {}
    groups = {
        group: {
            name: _with_files(spec, files[name]) if name in files else spec
            for name, spec in specs.items()
        }
        for group, specs in inputs.items()
        if isinstance(specs, Mapping)
    }
    return {**info, "input": {**inputs, **groups}}


def _with_files(spec: Sequence[Any], names: Sequence[str]) -> list[Any]:
    options = _options(spec)
    if isinstance(spec[0], list):
        return [list(names), options]
    if spec[0] == COMBO or "options" in options:
        return [spec[0], {**options, "options": list(names)}]
    return list(spec)


def merged(infos: Iterable[ObjectInfo]) -> dict[str, Mapping[str, Any]]:
    """Merges several object_infos. If they share a node type, its choices are combined, and the
    rest comes from the first one.
    """
    union: dict[str, Mapping[str, Any]] = {}
    for info in infos:
        for name, entry in info.items():
            known = union.get(name)
            union[name] = entry if known is None else _merged_entry(known, entry)
    return union


def _merged_entry(first: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    if first is other or first == other:
        return first
    groups = {
        group: {
            name: _merged_spec(spec, _inputs(other, group).get(name))
            for name, spec in _inputs(first, group).items()
        }
        for group in ("required", "optional")
        if _inputs(first, group)
    }
    return {**first, "input": {**first.get("input", {}), **groups}}


def _merged_spec(first: Any, other: Any) -> Any:
    """Adds the choices of `other` to the declaration `first` of an input. Supports both formats of
    ComfyUI, `[[…], {…}]` and `["COMBO", {"options": […]}]`.
    """
    choices, more = choices_of(first), choices_of(other)
    if choices is None or not more or choices == more:
        return first
    all_of = _all_of(choices, more)
    if isinstance(first[0], list):
        return [all_of, *first[1:]]
    return [first[0], {**first[1], "options": all_of}, *first[2:]]


# Maximum number of choices that are listed for an input, for all backends together.
CHOICES_MAX = 20_000


def _all_of(choices: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    """Concatenates two lists of choices without duplicates. A choice may be any JSON value."""
    known: dict[str, Any] = {}
    for choice in (*choices[:CHOICES_MAX], *more[:CHOICES_MAX]):
        known.setdefault(choice if isinstance(choice, str) else json_text([choice]), choice)
    return list(known.values())[:CHOICES_MAX]


def choices_of(spec: Any) -> list[Any] | None:
    if not isinstance(spec, list) or not spec:
        return None
    if isinstance(spec[0], list):
        return spec[0]
    options = _options(spec).get("options")
    return options if spec[0] == COMBO and isinstance(options, list) else None


class RenderedObjectInfo:
    """An object_info as JSON text. It is rendered once, except for entries that list a user's
    files.
    """

    def __init__(self, object_info: ObjectInfo) -> None:
        self._parts: list[bytes | tuple[str, Mapping[str, Any], Mapping[str, str]]] = []
        fixed: list[str] = []
        for name, entry in object_info.items():
            if uploads := upload_inputs(entry):
                self._add(fixed)
                fixed = []
                self._parts.append((name, entry, uploads))
            else:
                fixed.append(f"{json_text(name)}:{json_text(entry)}")
        self._add(fixed)

    def _add(self, fixed: Sequence[str]) -> None:
        if fixed:
            self._parts.append(",".join(fixed).encode())

    def body(self, files: FilesByKind) -> bytes:
        parts = (
            part if isinstance(part, bytes) else _rendered(*part, files) for part in self._parts
        )
        return b"{" + b",".join(parts) + b"}"


def _rendered(
    name: str, entry: Mapping[str, Any], uploads: Mapping[str, str], files: FilesByKind
) -> bytes:
    listed = {input_name: files.get(kind, ()) for input_name, kind in uploads.items()}
    return f"{json_text(name)}:{json_text(with_choices(entry, listed))}".encode()


Value = TypeVar("Value")
OFFERS_FRESH = timedelta(seconds=1)
# Maximum number of different backends of workers, for all fleets together. If this is exceeded, the
# most recently seen ones are used. The last known backends of fleets without workers don't count.
BACKENDS_MAX = 24
UNIONS_KEPT_MAX = 32
BODIES_KEPT_MAX = 64
FILES_LISTED_MAX = 1_000
LARGE_AT_ONCE_MAX = 2
KEY = "offers"


@dataclass(frozen=True)
class OfferedBackend:
    """The workers of a fleet whose backends report the same object_info. If the fleet has no
    workers, this is its last known backend.
    """

    fleet: Fleet
    terms: FleetPrompts
    hash: str
    object_info: ObjectInfo = field(repr=False)
    is_online: bool
    workers: int = 0
    first_worker: int | None = None  # The row id of a worker that represents the others.


@dataclass(frozen=True)
class OpenFleets:
    """All fleets that accept prompts, and their known backends."""

    fleets: Sequence[Fleet] = ()
    backends: Sequence[OfferedBackend] = ()


@dataclass(frozen=True)
class Offer:
    """The backends, node types and policies that apply to a tenant at a given moment. `hash`
    changes whenever `object_info` changes.
    """

    fleets: Sequence[Fleet]  # Fleets that accept the tenant's prompts, with or without workers.
    backends: Sequence[OfferedBackend]
    policies: Mapping[int, NodePolicy]  # Node policies by fleet id.
    object_info: ObjectInfo  # The permitted node types, with the choices of all backends.
    hash: str
    is_fresh: bool = True

    def nodes(self, files: FilesByKind) -> Mapping[str, OfferedNode]:
        """Returns the permitted node types. `files` contains the user's own files."""
        return OfferedNodes(self.object_info, files)

    def policy(self, backend: OfferedBackend) -> NodePolicy:
        return self.policies[backend.fleet.id]


async def offer_to(plane: ControlPlane, caller: Caller, *, fresh: bool = False) -> Offer:
    """Returns the offer for a user's prompts. Unless `fresh` is set, it may be a second old."""
    cache = offer_cache(plane)
    open_fleets, is_fresh = await cache.open_fleets(plane, fresh=fresh)
    terms = caller.tenant.prompts
    allowed = {
        fleet.id: fleet
        for fleet in open_fleets.fleets
        if terms.fleets is None or fleet.name in terms.fleets
    }
    mine = [backend for backend in open_fleets.backends if backend.fleet.id in allowed]
    policies = {backend.fleet.id: policy_of(backend.terms, terms) for backend in mine}
    shown = by_weight([backend for backend in mine if backend.is_online] or mine)
    key = tuple(dict.fromkeys((backend.hash, policies[backend.fleet.id]) for backend in shown))
    infos = {backend.hash: backend.object_info for backend in shown}
    union = await cache.unions.get(key, lambda: asyncio.to_thread(_union, key, infos))
    return Offer(list(allowed.values()), mine, policies, union, _hash(key), is_fresh)


def by_weight(backends: Sequence[OfferedBackend]) -> list[OfferedBackend]:
    """Sorts backends by their number of workers, largest first. Thus, a single worker with an
    unusual object_info doesn't change the node types that users see.
    """
    return sorted(
        backends, key=lambda backend: (-backend.workers, backend.fleet.name, backend.hash)
    )


UnionKey: TypeAlias = tuple[tuple[str, NodePolicy], ...]


def _union(key: UnionKey, infos: Mapping[str, ObjectInfo]) -> ObjectInfo:
    return merged(_allowed(infos[content_hash], policy) for content_hash, policy in key)


def _allowed(object_info: ObjectInfo, policy: NodePolicy) -> ObjectInfo:
    return {name: info for name, info in object_info.items() if policy.refusal(name, info) is None}


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:32]


class LatestCache(Generic[Value]):
    """An LRU cache with a maximum number of entries. The value of a key never changes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, Value] = OrderedDict()

    async def get(self, key: Hashable, make: Callable[[], Any]) -> Value:
        if key not in self._kept:
            self._kept[key] = await make()
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]


class OfferCache:
    """The caches for offers, which all requests in this process share."""

    def __init__(self) -> None:
        self.unions: LatestCache[ObjectInfo] = LatestCache(UNIONS_KEPT_MAX)
        self.rendered: LatestCache[RenderedObjectInfo] = LatestCache(UNIONS_KEPT_MAX)
        self.zipped: LatestCache[bytes] = LatestCache(BODIES_KEPT_MAX)
        # Limits the number of large prompts that are matched concurrently. Each uses a CPU core.
        self.large = asyncio.Semaphore(LARGE_AT_ONCE_MAX)
        self._found = OpenFleets()
        self._read_at: datetime | None = None
        self._turn = asyncio.Lock()
        self._reads = 0

    def forget(self) -> None:
        self._read_at = None

    async def open_fleets(
        self, plane: ControlPlane, *, fresh: bool = False
    ) -> tuple[OpenFleets, bool]:
        """Returns the fleets that accept prompts, and whether they were read after this call
        began.
        """
        if not fresh and self._is_young(plane):
            return self._found, False
        before = self._reads
        async with self._turn:
            # Another task may have read the fleets while this one was waiting. With `fresh`, only a
            # read that began after this call is recent enough.
            if self._reads == before or (fresh and self._reads < before + 2):
                self._found = await read_open_fleets(plane)
                self._read_at = plane.clock()
                self._reads += 1
        return self._found, True

    def _is_young(self, plane: ControlPlane) -> bool:
        at = self._read_at
        return at is not None and timedelta() <= plane.clock() - at < OFFERS_FRESH


def offer_cache(plane: ControlPlane) -> OfferCache:
    cache: OfferCache = plane.context.caches.gateway.setdefault(KEY, OfferCache())
    return cache


async def read_open_fleets(plane: ControlPlane) -> OpenFleets:
    async with plane.central.read() as tx:
        all_fleets = await fleets.list_fleets(tx)
        kinds = await fleets.backend_kinds(tx)
    terms = {fleet.id: open_on for fleet in all_fleets if (open_on := fleet.prompts) is not None}
    by_id = {fleet.id: fleet for fleet in all_fleets if fleet.id in terms}
    since = plane.clock() - timedelta(seconds=plane.settings.offline_after_seconds)
    newest_first = sorted(
        (kind for kind in kinds if kind.fleet_id in by_id),
        key=lambda kind: kind.last_seen_at,
        reverse=True,
    )
    backends = []
    for kind in newest_first[:BACKENDS_MAX]:
        fleet = by_id[kind.fleet_id]
        backends += await _backend(plane, fleet, terms[fleet.id], kind, since)
    with_backends = {backend.fleet.id for backend in backends}
    for fleet in by_id.values():
        if fleet.id not in with_backends and fleet.object_info_hash is not None:
            backends += await _last_backend(plane, fleet, terms[fleet.id], fleet.object_info_hash)
    backends.sort(key=lambda backend: (backend.fleet.name, backend.hash))
    return OpenFleets(list(by_id.values()), backends)


async def _backend(
    plane: ControlPlane, fleet: Fleet, terms: FleetPrompts, kind: BackendKind, since: datetime
) -> list[OfferedBackend]:
    info = await plane.context.caches.object_infos.get(plane.store, fleet, kind.object_info_hash)
    if info is None:
        return []
    is_online = kind.last_seen_at >= since
    return [
        OfferedBackend(
            fleet, terms, kind.object_info_hash, info, is_online, kind.workers, kind.first_worker
        )
    ]


async def _last_backend(
    plane: ControlPlane, fleet: Fleet, terms: FleetPrompts, content_hash: str
) -> list[OfferedBackend]:
    """Returns the last known backend of a fleet that currently has no workers. Prompts for it wait
    until a worker comes online.
    """
    info = await plane.context.caches.object_infos.get(plane.store, fleet, content_hash)
    return [] if info is None else [OfferedBackend(fleet, terms, content_hash, info, False)]


@dataclass(frozen=True)
class ObjectInfoBody:
    """The response to `GET /object_info`. It is rendered only if the client's copy is outdated."""

    etag: str
    offer: Offer
    files: FilesByKind
    cache: OfferCache

    async def plain(self) -> bytes:
        offer = self.offer
        rendered = await self.cache.rendered.get(
            offer.hash, lambda: asyncio.to_thread(RenderedObjectInfo, offer.object_info)
        )
        return rendered.body(self.files)

    async def zipped(self) -> bytes:
        async def make() -> bytes:
            return await asyncio.to_thread(gzip.compress, await self.plain(), 6, mtime=0)

        return await self.cache.zipped.get(self.etag, make)


async def fresh_offer_to(plane: ControlPlane, caller: Caller) -> Offer:
    """Refreshes the facts about the backends, and returns the offer for the user's prompts."""
    offer = await offer_to(plane, caller)
    await freshness_of(plane).refresh(offer.fleets)
    return await offer_to(plane, caller, fresh=True)


async def object_info_body(plane: ControlPlane, caller: Caller) -> ObjectInfoBody:
    """Returns a body with all node types that the user may use. Inputs that accept uploads list the
    user's own files.
    """
    offer = await fresh_offer_to(plane, caller)
    files = by_kind(await input_names(plane, caller))
    return ObjectInfoBody(_hash((offer.hash, files)), offer, files, offer_cache(plane))


async def object_info_of(plane: ControlPlane, caller: Caller, name: str) -> dict[str, Any]:
    """Returns the object_info entry of a node type, or an empty dict if the type doesn't exist or
    isn't permitted.
    """
    offer = await fresh_offer_to(plane, caller)
    if name not in offer.object_info:
        return {}
    files = by_kind(await input_names(plane, caller))
    return dict(offer.nodes(files)[name].entry())


async def input_names(plane: ControlPlane, caller: Caller) -> Iterable[str]:
    """Returns the names of the user's uploads, newest first."""
    async with plane.context.tenant(caller.tenant.id) as tx:
        rows = await run_log.list_files(
            tx, caller.tenant.id, caller.user_id, "input", limit=FILES_LISTED_MAX
        )
    return [row.path for row in rows]
