"""What a run is started from, frozen: the graph, and the facts of its workflows at that moment. Pure."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from uuid import UUID

from comfyfleet.effects.model import Property
from comfyfleet.fleets.offers import ModelUse
from comfyfleet.graphs.catalogue import EffectTerms, WorkflowFacts, catalogue_of
from comfyfleet.graphs.model import Graph
from comfyfleet.graphs.parsing import parse_graph
from comfyfleet.graphs.plan import Plan, plan_of, refuse
from comfyfleet.graphs.writing import document_of


def saved_plan(plan: Plan) -> dict[str, Any]:
    """As JSON takes it."""
    facts = {(each.name, each.slug, each.version): each for each in plan.workflows.values()}
    return {
        "graph": document_of(plan.graph),
        "workflows": [_saved(each) for each in facts.values()],
    }


def restored_plan(saved: Mapping[str, Any]) -> Plan:
    """Of an expired run nothing is left, which is a graph without nodes."""
    if not saved:
        return plan_of(Graph("", {}, ()), catalogue_of(()))
    parsed = parse_graph(saved["graph"])
    refuse(list(parsed.problems))
    return plan_of(parsed.graph, catalogue_of(tuple(map(_restored, saved["workflows"]))))


def _saved(facts: WorkflowFacts) -> dict[str, Any]:
    return {
        "slug": facts.slug,
        "version": facts.version,
        "properties": [asdict(each) for each in facts.properties],
        "price_tokens": facts.price_tokens,
        "typical_seconds": facts.typical_seconds,
        "required_capabilities": sorted(facts.required_capabilities),
        "is_current": facts.is_current,
        "effect": _saved_effect(facts.effect) if facts.effect else None,
        "locked_choices": [list(each) for each in facts.locked_choices],
    }


def _saved_effect(effect: EffectTerms) -> dict[str, Any]:
    return {**asdict(effect), "id": str(effect.id)}


def _restored(saved: Mapping[str, Any]) -> WorkflowFacts:
    return WorkflowFacts(
        slug=saved["slug"],
        version=saved["version"],
        properties=tuple(map(_property, saved["properties"])),
        price_tokens=saved["price_tokens"],
        typical_seconds=saved["typical_seconds"],
        required_capabilities=frozenset(saved["required_capabilities"]),
        is_current=saved["is_current"],
        effect=_restored_effect(saved.get("effect")),
        locked_choices=tuple(ModelUse(*each) for each in saved.get("locked_choices", ())),
    )


def _restored_effect(saved: Mapping[str, Any] | None) -> EffectTerms | None:
    if saved is None:
        return None
    tuples = {name: tuple(saved[name]) for name in ("locked", "media_types")}
    return EffectTerms(**{**saved, **tuples, "id": UUID(saved["id"])})


def _property(saved: Mapping[str, Any]) -> Property:
    choices = saved["choices"]
    return Property(**{**saved, "choices": None if choices is None else tuple(choices)})
