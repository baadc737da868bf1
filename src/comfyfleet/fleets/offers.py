"""What a worker's backend offers, and what it lacks of what is needed. Pure."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from comfyfleet.wire.messages import BackendFacts

REFUSED_NAMES_MAX = 1_000
# A backend may get what its lists never show; after so long it is tried again.
REFUSALS_KEPT = timedelta(minutes=15)


class ModelUse(NamedTuple):
    """A model file that a prompt names; `input` is `Class.input`, or empty where it isn't known."""

    input: str
    file: str


@dataclass(frozen=True, slots=True)
class Missing:
    """What a backend lacks of what is needed."""

    node_types: tuple[str, ...] = ()
    models: tuple[ModelUse, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.node_types or self.models)

    def in_words(self) -> str:
        parts = [f"node {name}" for name in self.node_types]
        return ", ".join([*parts, *(f"model {each.file}" for each in self.models)])


@dataclass(frozen=True, slots=True)
class Needs:
    """What a version of a workflow needs, whatever its jobs choose."""

    node_types: tuple[str, ...] = ()
    models: tuple[ModelUse, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusals:
    """What a backend has refused although its lists did not rule it out."""

    node_types: frozenset[str] = frozenset()
    models: frozenset[ModelUse] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.node_types or self.models)


@dataclass(frozen=True, slots=True)
class Offer:
    """Node types and model files of a backend. Two with the same key offer the same."""

    key: str
    node_types: frozenset[str] = frozenset()
    model_files: Mapping[str, frozenset[str]] = field(default_factory=dict, hash=False)
    refusals: Refusals = field(default_factory=Refusals)

    def lacks(self, node_types: Iterable[str], models: Iterable[ModelUse]) -> Missing:
        """What is not listed at all is not held against the backend: nobody can tell."""
        return Missing(
            tuple(name for name in node_types if self._lacks_type(name)),
            tuple(use for use in models if self._lacks_model(use)),
        )

    def lacks_choice(self, choice: ModelUse) -> bool:
        """Of a file for an input that is known by its name alone, whichever class has it."""

        def is_meant(name: str) -> bool:
            return name.rpartition(".")[2] == choice.input

        lists = [files for name, files in self.model_files.items() if is_meant(name)]
        is_unlisted = bool(lists) and not any(choice.file in files for files in lists)
        refused = (use for use in self.refusals.models if is_meant(use.input))
        return is_unlisted or any(use.file == choice.file for use in refused)

    def _lacks_type(self, name: str) -> bool:
        is_unlisted = bool(self.node_types) and name not in self.node_types
        return is_unlisted or name in self.refusals.node_types

    def _lacks_model(self, use: ModelUse) -> bool:
        offered = self.model_files.get(use.input)
        is_unlisted = offered is not None and use.file not in offered
        return is_unlisted or use in self.refusals.models


NONE_REFUSED = Refusals()


def offer_of(facts: BackendFacts | None, refusals: Refusals = NONE_REFUSED, key: str = "") -> Offer:
    if facts is None:
        return Offer(key, refusals=refusals)
    files = {name: frozenset(offered) for name, offered in facts.model_files.items()}
    return Offer(key, frozenset(facts.node_types), files, refusals)


def facts_hash(facts: BackendFacts) -> str:
    """Equal for backends that offer the same: lists of uploaded files and versions don't count."""
    files = {name: sorted(offered) for name, offered in facts.model_files.items()}
    told = json.dumps([sorted(facts.node_types), files], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


def refusals_in(kept: Mapping[str, Any] | None, now: datetime) -> Refusals:
    """From the worker's row; those of long ago are forgotten."""
    if not kept or datetime.fromisoformat(kept["at"]) + REFUSALS_KEPT <= now:
        return Refusals()
    models = frozenset(ModelUse(*each) for each in kept["models"])
    return Refusals(frozenset(kept["node_types"]), models)


def with_refusal(kept: Mapping[str, Any] | None, missing: Missing, now: datetime) -> dict[str, Any]:
    """As it is kept in the worker's row."""
    before = refusals_in(kept, now)
    models = sorted({*before.models, *missing.models})[:REFUSED_NAMES_MAX]
    return {
        "at": now.isoformat(),
        "node_types": sorted({*before.node_types, *missing.node_types})[:REFUSED_NAMES_MAX],
        "models": [list(each) for each in models],
    }


def needs_of(
    node_types: Iterable[str],
    models: Iterable[Iterable[str]],
    properties: Iterable[Mapping[str, Any]],
) -> Needs:
    """Without the models that a job may choose: those are looked at job by job."""
    declared = list(properties)
    bound = {str(each["binding"]).rpartition(".")[2] for each in declared if each.get("binding")}
    filled = [str(each.get("default")) for each in declared if each.get("placeholder")]
    fixed = (
        use
        for use in (ModelUse(*each) for each in models)
        if use.input.partition(".")[2] not in bound
        and not any(text in use.file for text in filled if text)
    )
    return Needs(tuple(node_types), tuple(fixed))
