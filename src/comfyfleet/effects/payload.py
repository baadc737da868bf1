"""What a job runs: the prompt with its properties filled in, and the files it needs. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from comfyfleet.effects import models
from comfyfleet.effects.model import AssetRef, Payload, Property, Version
from comfyfleet.effects.placeholders import filled, places_of
from comfyfleet.effects.prompting import (
    Chance,
    marked_prompt_of,
    place_of,
    placeholders_of,
    with_value,
)
from comfyfleet.effects.values import resolve, wrong
from comfyfleet.kernel.errors import InvalidInput


def build(
    version: Version,
    document: Mapping[str, Any],
    object_info: Mapping[str, Any],
    values: Mapping[str, Any],
    overrides: Mapping[str, Any],
    *,
    files: Mapping[str, UUID] | None = None,
    seed: int,
    chance: Chance = Chance(),  # noqa: B008 - frozen
) -> Payload:
    """`values` are the user's, `overrides` the effect's; `files` are more values, by property.

    `seed` is for every property of that type without a value, so it is drawn anew for each job.
    """
    resolved = resolved_for(version, values, overrides, files=files, seed=seed)
    return filled_in(version, marked(version, document, object_info, chance), object_info, resolved)


def resolved_for(
    version: Version,
    values: Mapping[str, Any],
    overrides: Mapping[str, Any],
    *,
    files: Mapping[str, UUID] | None,
    seed: int,
) -> dict[str, Any]:
    return resolve(version.properties, {**values, **(files or {})}, overrides, seed=seed)


def marked(
    version: Version,
    document: Mapping[str, Any],
    object_info: Mapping[str, Any],
    chance: Chance,
) -> dict[str, Any]:
    """The prompt before anybody's values: the same for all jobs that are given the same chance."""
    placeholders = placeholders_of(version.properties)
    return marked_prompt_of(version.kind, document, object_info, placeholders, chance=chance)


def filled_in(
    version: Version,
    prompt: Mapping[str, Any],
    object_info: Mapping[str, Any],
    resolved: Mapping[str, Any],
) -> Payload:
    """A marked prompt with values."""
    properties = version.properties
    placeholders = placeholders_of(properties)
    assets = tuple(
        asset for each in properties for asset in _assets(each, resolved, prompt, placeholders)
    )
    _refuse_overlap(properties, resolved, assets)
    whole = _filled(prompt, properties, resolved, object_info)
    uses = models.models_of(whole)
    return Payload(
        prompt=whole,
        assets=assets,
        properties={name: _plain(value) for name, value in resolved.items()},
        model_key=models.model_key(uses),
        model_set=models.model_set(uses),
    )


def with_defaults(
    prompt: Mapping[str, Any], properties: Sequence[Property], object_info: Mapping[str, Any]
) -> dict[str, Any]:
    """A marked prompt as it would be if nobody said anything; what has no default stays as it stands."""
    defaults = {each.name: each.default for each in properties if each.default is not None}
    return _filled(prompt, properties, defaults, object_info)


def _filled(
    prompt: Mapping[str, Any],
    properties: Sequence[Property],
    resolved: Mapping[str, Any],
    object_info: Mapping[str, Any],
) -> dict[str, Any]:
    """Files keep their placeholder, or the input its value, until the worker knows the name."""
    texts = [each for each in properties if each.placeholder]
    marks = {
        number: each.placeholder if _is_open(each, resolved) else resolved[each.name]
        for number, each in enumerate(texts)
    }
    result = filled(prompt, marks)
    for each in properties:
        if each.binding is None or _is_open(each, resolved):
            continue
        place = place_of(each.binding, result)
        if place is None:
            raise InvalidInput(
                f"the property {each.name}: the node of its binding {each.binding} is not in the "
                "prompt that this fleet's backends would get",
                property=each.name,
            )
        result = with_value(result, place, resolved[each.name], object_info)
    return result


def _is_open(each: Property, resolved: Mapping[str, Any]) -> bool:
    return each.name not in resolved or isinstance(resolved[each.name], UUID)


def _assets(
    each: Property,
    resolved: Mapping[str, Any],
    prompt: Mapping[str, Any],
    placeholders: Sequence[str],
) -> list[AssetRef]:
    file_id = resolved.get(each.name)
    if not isinstance(file_id, UUID):
        return []
    if each.placeholder is None:
        return [AssetRef(each.name, file_id, each.type, each.binding, None, each.is_primary_input)]
    places = places_of(prompt, placeholders.index(each.placeholder))
    # Bound to where it stands: a user's text may hold the same letters, and is none of its places.
    bindings = [f"{node_id}.{name}" for node_id, name, is_whole in places if is_whole]
    is_inside_text = len(bindings) < len(places)
    found: list[tuple[str | None, str | None]] = [(binding, None) for binding in bindings]
    if is_inside_text:
        found.append((None, each.placeholder))
    return [
        AssetRef(
            each.name if number == 1 else f"{each.name}#{number}",
            file_id,
            each.type,
            binding,
            placeholder,
            each.is_primary_input and number == 1,
        )
        for number, (binding, placeholder) in enumerate(found, start=1)
    ]


def _refuse_overlap(
    properties: Sequence[Property], resolved: Mapping[str, Any], assets: Sequence[AssetRef]
) -> None:
    """The worker replaces a file's placeholder wherever it reads it, in what a user wrote as well."""
    waiting = [asset.placeholder for asset in assets if asset.placeholder]
    for each in properties:
        value = resolved.get(each.name)
        if isinstance(value, str) and any(text in value for text in waiting):
            raise wrong(each, "the text holds the placeholder of a file")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, UUID) else value
