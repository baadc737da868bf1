"""All SQL for workflows, their versions, and effects."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any
from uuid import UUID

from sqlalchemy import (
    Row,
    ScalarSelect,
    Select,
    Table,
    Text,
    and_,
    bindparam,
    cast,
    insert,
    or_,
    select,
    update,
)

from comfyfleet.server.catalog.model import (
    EffectDefinition,
    EffectExample,
    EffectSettings,
    ExampleFile,
    Property,
    RegisteredWorkflow,
    ResolvedEffect,
    RunTerms,
    WorkflowVersion,
)
from comfyfleet.server.db import Tx
from comfyfleet.server.db.central_tables import (
    effects,
    fleets,
    workflow_fleets,
    workflow_versions,
    workflows,
)
from comfyfleet.server.db.central_tables import workflow_versions as versions
from comfyfleet.server.db.dialect import for_update, insert_if_new, is_one_of
from comfyfleet.server.db.driver import PreparedStatement, in_parts
from comfyfleet.server.fleets.model import Fleet, ModelUse


async def add_workflow(tx: Tx, row: Mapping[str, Any]) -> RegisteredWorkflow | None:
    """Adds a workflow. Returns None if the slug already exists."""
    added = (await tx.execute(insert_if_new(tx, workflows, [row]).returning(workflows))).first()
    return _workflow(added) if added else None


async def lock_next_version(tx: Tx, slug: str) -> tuple[RegisteredWorkflow, int] | None:
    """Returns a workflow and the number of its next version. The row lock ensures that concurrent
    callers get different numbers."""
    locked = update(workflows).where(workflows.c.slug == slug).values(slug=slug)
    row = (await tx.execute(locked.returning(workflows))).first()
    if row is None:
        return None
    workflow = _workflow(row)
    highest = await tx.scalar(
        select(workflow_versions.c.version)
        .where(workflow_versions.c.workflow_id == workflow.id)
        .order_by(workflow_versions.c.version.desc())
        .limit(1)
    )
    return workflow, (highest or 0) + 1


async def update_workflow(
    tx: Tx, workflow_id: int, values: Mapping[str, Any]
) -> RegisteredWorkflow | None:
    statement = update(workflows).where(workflows.c.id == workflow_id).values(dict(values))
    row = (await tx.execute(statement.returning(workflows))).first()
    return _workflow(row) if row else None


async def get_workflow(tx: Tx, workflow_id: int) -> RegisteredWorkflow | None:
    row = (await tx.execute(select(workflows).where(workflows.c.id == workflow_id))).first()
    return _workflow(row) if row else None


async def workflow_by_slug(tx: Tx, slug: str) -> RegisteredWorkflow | None:
    row = (await tx.execute(select(workflows).where(workflows.c.slug == slug))).first()
    return _workflow(row) if row else None


async def all_workflows(tx: Tx, *, with_open: bool) -> list[RegisteredWorkflow]:
    query = select(workflows).order_by(workflows.c.slug)
    if not with_open:
        query = query.where(workflows.c.is_open.is_(False))
    return [_workflow(row) for row in await tx.execute(query)]


async def add_version(tx: Tx, version: WorkflowVersion) -> None:
    row = {**asdict(version), "models": [[model.input, model.file] for model in version.models]}
    row["properties"] = [property_row(prop) for prop in version.properties]
    row["node_types"] = list(version.node_types)
    await tx.execute(insert(workflow_versions).values(row))


async def get_version(tx: Tx, workflow_id: int, version: int) -> WorkflowVersion | None:
    query = select(workflow_versions).where(
        workflow_versions.c.workflow_id == workflow_id, workflow_versions.c.version == version
    )
    row = (await tx.execute(query)).first()
    return _version(row) if row else None


async def versions_of(tx: Tx, workflow_id: int) -> list[WorkflowVersion]:
    query = (
        select(workflow_versions)
        .where(workflow_versions.c.workflow_id == workflow_id)
        .order_by(workflow_versions.c.version.desc())
    )
    return [_version(row) for row in await tx.execute(query)]


async def current_versions(
    tx: Tx, workflow_ids: Collection[int]
) -> dict[int, tuple[RegisteredWorkflow, WorkflowVersion]]:
    """Returns workflows by id, each with the version that new jobs get."""
    query = select(workflows).where(is_one_of(tx, workflows.c.id, workflow_ids))
    workflows_by_id = {row.id: _workflow(row) for row in await tx.execute(query)}
    is_current = and_(
        workflow_versions.c.workflow_id == workflows.c.id,
        workflow_versions.c.version == workflows.c.version,
    )
    current = select(workflow_versions).join(workflows, is_current)
    rows = await tx.execute(current.where(is_one_of(tx, workflows.c.id, workflow_ids)))
    return {row.workflow_id: (workflows_by_id[row.workflow_id], _version(row)) for row in rows}


def property_row(prop: Property) -> dict[str, Any]:
    """Converts a property to JSON without None fields, so that fields added later need no
    migration."""
    return {name: value for name, value in asdict(prop).items() if value is not None}


def _workflow(row: Row[Any]) -> RegisteredWorkflow:
    return workflow_of(row._mapping)


def workflow_of(values: Mapping[Any, Any]) -> RegisteredWorkflow:
    row = dict(values)
    if not row.pop("is_offered"):
        row["price_tokens"] = None
    return RegisteredWorkflow(
        **{**row, "required_capabilities": frozenset(row["required_capabilities"])}
    )


def _version(row: Row[Any]) -> WorkflowVersion:
    return version_of(row._mapping)


def version_of(row: Mapping[Any, Any]) -> WorkflowVersion:
    values = dict(row)
    values["properties"] = tuple(_property(prop) for prop in values["properties"])
    values["models"] = tuple(ModelUse(*model) for model in values["models"])
    values["node_types"] = tuple(values["node_types"])
    return WorkflowVersion(**values)


def _property(row: Mapping[str, Any]) -> Property:
    choices = row.get("choices")
    return Property(**{**row, "choices": None if choices is None else tuple(choices)})


TAGGED_EFFECTS_MAX = 1000
_SETTINGS_COLUMNS = tuple(field.name for field in fields(EffectSettings))
_OTHER_COLUMNS = tuple(field.name for field in fields(EffectDefinition) if field.name != "settings")
# Columns of several tables in one row, distinguished by prefixes.
_EFFECT_TABLES = ((effects, "effect_"), (workflows, "workflow_"), (versions, "version_"))
_EFFECT_AND_FLEET_TABLES = (*_EFFECT_TABLES, (fleets, "fleet_"))
_COLUMNS = [[column.name for column in table.c] for table, _ in _EFFECT_AND_FLEET_TABLES]


def _resolved_query(*tables: tuple[Table, str]) -> Select[Any]:
    return (
        select(
            *(column.label(prefix + column.name) for table, prefix in tables for column in table.c)
        )
        .select_from(effects)
        .join(workflows, workflows.c.id == effects.c.workflow_id)
        .join(
            versions,
            and_(
                versions.c.workflow_id == workflows.c.id, versions.c.version == workflows.c.version
            ),
        )
        .where(effects.c.id == bindparam("of_id"))
    )


def _fleet_for() -> ScalarSelect[int]:
    """Selects the fleet for an effect: among the fleets with the workflow, the first one with known
    node types, otherwise the first."""
    assigned = fleets.alias("assigned")
    return (
        select(assigned.c.id)
        .join(workflow_fleets, workflow_fleets.c.fleet_id == assigned.c.id)
        .where(workflow_fleets.c.workflow_id == workflows.c.id, assigned.c.stage == effects.c.stage)
        .order_by(assigned.c.object_info_hash.is_(None), assigned.c.slug)
        .limit(1)
        .correlate(effects, workflows)
        .scalar_subquery()
    )


_RESOLVED = PreparedStatement(lambda tx: _resolved_query(*_EFFECT_TABLES))
_RESOLVED_WITH_FLEET = PreparedStatement(
    lambda tx: _resolved_query(*_EFFECT_AND_FLEET_TABLES).outerjoin(
        fleets, fleets.c.id == _fleet_for()
    )
)


async def resolve_effect(tx: Tx, effect_id: UUID) -> ResolvedEffect | None:
    """Reads an effect with its workflow and the version that new jobs get."""
    rows = await _RESOLVED.tuples(tx, {"of_id": effect_id})
    return _resolved_effect(*in_parts(rows[0], *_COLUMNS[:-1])) if rows else None


async def resolve_effect_with_fleet(
    tx: Tx, effect_id: UUID | None
) -> tuple[ResolvedEffect, Fleet | None] | None:
    """Reads an effect like `resolve_effect`, and the fleet whose object_info is used to convert the
    workflow."""
    rows = await _RESOLVED_WITH_FLEET.tuples(tx, {"of_id": effect_id})
    if not rows:
        return None
    *behind, fleet = in_parts(rows[0], *_COLUMNS)
    return _resolved_effect(*behind), None if fleet["id"] is None else Fleet(**fleet)


def _resolved_effect(
    effect: Mapping[str, Any], workflow: Mapping[str, Any], version: Mapping[str, Any]
) -> ResolvedEffect:
    return ResolvedEffect(_effect_of(effect), workflow_of(workflow), version_of(version))


_TYPICAL = PreparedStatement(
    lambda tx: select(effects.c.typical_seconds).where(effects.c.id == bindparam("of_id"))
)


async def typical_seconds(tx: Tx, effect_id: UUID) -> float | None:
    row = await _TYPICAL.first(tx, {"of_id": effect_id})
    return row["typical_seconds"] if row else None


_RUN_TERMS = PreparedStatement(
    lambda tx: (
        select(
            workflows.c.run_limit_seconds,
            effects.c.keep_metadata,
            workflows.c.output,
            workflows.c.ai_mark,
        )
        .select_from(workflows.outerjoin(effects, effects.c.id == bindparam("of_effect")))
        .where(workflows.c.id == bindparam("of_workflow"))
    )
)


async def run_terms(tx: Tx, workflow_id: int, effect_id: UUID | None) -> RunTerms | None:
    """Reads the settings of a run. Returns None if the workflow doesn't exist."""
    rows = await _RUN_TERMS.tuples(tx, {"of_workflow": workflow_id, "of_effect": effect_id})
    if not rows:
        return None
    run_limit_seconds, keeps_metadata, output, ai_mark = rows[0]
    return RunTerms(run_limit_seconds, bool(keeps_metadata), output, ai_mark)


async def add_effect(tx: Tx, effect: EffectDefinition) -> EffectDefinition | None:
    """Adds an effect. Returns None if the slug already exists."""
    row = {
        "id": effect.id,
        "slug": effect.slug,
        "workflow_id": effect.workflow_id,
        "created_at": effect.created_at,
        **settings_row(effect.settings),
    }
    added = (await tx.execute(insert_if_new(tx, effects, [row]).returning(effects))).first()
    return _effect(added) if added else None


async def get_effect(tx: Tx, effect_id: UUID) -> EffectDefinition | None:
    row = (await tx.execute(select(effects).where(effects.c.id == effect_id))).first()
    return _effect(row) if row else None


async def get_effects(tx: Tx, effect_ids: Collection[UUID]) -> list[EffectDefinition]:
    query = select(effects).where(is_one_of(tx, effects.c.id, effect_ids))
    return [_effect(row) for row in await tx.execute(query)]


async def effect_by_slug(tx: Tx, slug: str, *, is_locked: bool = False) -> EffectDefinition | None:
    query = select(effects).where(effects.c.slug == slug)
    row = (await tx.execute(for_update(tx, query) if is_locked else query)).first()
    return _effect(row) if row else None


async def published_slugs(tx: Tx) -> list[str]:
    query = (
        select(effects.c.slug)
        .join(workflows, effects.c.workflow_id == workflows.c.id)
        .where(effects.c.is_published.is_(True), workflows.c.is_active.is_(True))
        .order_by(effects.c.slug)
    )
    return list(await tx.scalars(query))


async def all_effects(tx: Tx, *, workflow_id: int | None, limit: int) -> list[EffectDefinition]:
    query = select(effects).order_by(effects.c.slug).limit(limit)
    if workflow_id is not None:
        query = query.where(effects.c.workflow_id == workflow_id)
    return [_effect(row) for row in await tx.execute(query)]


async def effect_slugs(tx: Tx, effect_ids: Collection[UUID]) -> dict[UUID, str]:
    query = select(effects.c.id, effects.c.slug).where(is_one_of(tx, effects.c.id, effect_ids))
    return {row.id: row.slug for row in await tx.execute(query)}


def _published(*what: Any) -> Select[Any]:
    return (
        select(*what)
        .join_from(effects, workflows, effects.c.workflow_id == workflows.c.id)
        .where(effects.c.is_published.is_(True), workflows.c.is_active.is_(True))
        .order_by(effects.c.slug)
    )


async def published_effects(
    tx: Tx, *, after_slug: str | None, limit: int, text: str | None = None, tag: str | None = None
) -> list[EffectDefinition]:
    """Returns a page of published effects whose workflows are active."""
    query = _published(effects).limit(limit)
    if after_slug is not None:
        query = query.where(effects.c.slug > after_slug)
    if text is not None:
        words = (effects.c.slug, effects.c.title, effects.c.description, cast(effects.c.tags, Text))
        query = query.where(or_(*(column.icontains(text, autoescape=True) for column in words)))
    if tag is not None:
        # A tag contains no characters that have a special meaning in JSON or LIKE.
        query = query.where(cast(effects.c.tags, Text).contains(f'"{tag}"'))
    return [_effect(row) for row in await tx.execute(query)]


async def published_tags(tx: Tx) -> set[str]:
    rows = await tx.scalars(_published(effects.c.tags).limit(TAGGED_EFFECTS_MAX))
    return {tag for row in rows for tag in row}


async def all_examples(tx: Tx) -> list[EffectExample]:
    query = select(effects.c.examples).where(cast(effects.c.examples, Text) != "[]")
    return [example for row in await tx.scalars(query) for example in _examples(row)]


async def update_effect(
    tx: Tx, effect_id: UUID, values: Mapping[str, Any]
) -> EffectDefinition | None:
    statement = update(effects).where(effects.c.id == effect_id).values(dict(values))
    row = (await tx.execute(statement.returning(effects))).first()
    return _effect(row) if row else None


_RECENT = PreparedStatement(
    lambda tx: for_update(
        tx,
        select(effects.c.recent_seconds, effects.c.typical_seconds).where(
            effects.c.id == bindparam("of_id")
        ),
    )
)


_SET_RECENT = PreparedStatement(
    lambda tx: (
        update(effects)
        .where(effects.c.id == bindparam("of_id"))
        .values(
            recent_seconds=bindparam("recent"),
            last_processing_time_seconds=bindparam("last"),
            typical_seconds=bindparam("typical"),
        )
    )
)


async def recent_seconds(tx: Tx, effect_id: UUID) -> list[float]:
    """Returns the durations of the last runs, and locks the row. For runs of older releases, only
    the typical duration is known."""
    row = await _RECENT.first(tx, {"of_id": effect_id})
    if row is None:
        return []
    typical = row["typical_seconds"]
    return list(row["recent_seconds"]) or ([] if typical is None else [typical])


async def set_recent_seconds(tx: Tx, effect_id: UUID, recent: list[float], typical: float) -> None:
    values = {"recent": recent, "last": recent[-1], "typical": typical}
    await _SET_RECENT.tuples(tx, {"of_id": effect_id, **values})


def settings_row(settings: EffectSettings) -> dict[str, Any]:
    return {
        **asdict(settings),
        "overrides": dict(settings.overrides),
        "media_types": list(settings.media_types),
        "locked": list(settings.locked),
        "tags": list(settings.tags),
    }


def example_row(example: EffectExample) -> dict[str, Any]:
    return asdict(example)


def _examples(rows: Iterable[Mapping[str, Any]]) -> tuple[EffectExample, ...]:
    return tuple(
        EffectExample(
            **{side: ExampleFile(**row[side]) for side in ("before", "after") if row.get(side)}
        )
        for row in rows
    )


def _effect(row: Row[Any]) -> EffectDefinition:
    return _effect_of(row._mapping)


def _effect_of(values: Mapping[Any, Any]) -> EffectDefinition:
    settings = {name: values[name] for name in _SETTINGS_COLUMNS}
    rest = {name: values[name] for name in _OTHER_COLUMNS}
    tuples = {name: tuple(settings[name]) for name in ("media_types", "locked", "tags")}
    rest["examples"] = _examples(rest["examples"])
    return EffectDefinition(settings=EffectSettings(**{**settings, **tuples}), **rest)
