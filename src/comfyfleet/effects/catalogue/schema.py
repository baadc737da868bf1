"""Properties as JSON Schema (2020-12), from which a client can build a form. Pure.

What JSON Schema has no word for stands in `x-` fields: the step of a slider (a value between two steps
is taken, so it is no `multipleOf`), which kind of file an id must name, and that a seed may be left out.
The media that an effect is applied to is no property here: it comes as `video_id`.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from comfyfleet.effects.model import SEED_MAX, Property
from comfyfleet.effects.values import TEXT_CHARACTERS_MAX

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema_of(
    properties: Iterable[Property],
    overrides: Mapping[str, Any],
    locked: Collection[str] = (),
) -> dict[str, Any]:
    """What a customer may send as `properties`; an override is what they get if they send nothing.

    What is locked is not theirs to send.
    """
    shown = [each for each in properties if not each.is_primary_input and each.name not in locked]
    return {
        "$schema": DIALECT,
        "type": "object",
        "properties": {each.name: _one(each, overrides) for each in shown},
        "required": [each.name for each in shown if _is_needed(each, overrides)],
        "additionalProperties": False,
    }


def _one(each: Property, overrides: Mapping[str, Any]) -> dict[str, Any]:
    schema = {"title": each.name.replace("_", " ").strip().capitalize(), **_shape(each)}
    if each.description:
        schema["description"] = each.description
    default = overrides.get(each.name)
    if default is None:
        default = each.default
    # A default of ours for a file names one that the backend has, which no customer could send.
    if default is not None and not each.is_media:
        schema["default"] = default
    return schema


def _shape(each: Property) -> dict[str, Any]:
    if each.type == "choice":
        return {"enum": list(each.choices or ())}
    if each.is_media:
        return {"type": "string", "format": "uuid", "x-media": each.type}
    if each.type == "text":
        return {"type": "string", "maxLength": TEXT_CHARACTERS_MAX}
    if each.type == "boolean":
        return {"type": "boolean"}
    return _numeric(each)


def _numeric(each: Property) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "number" if each.type == "number" else "integer"}
    least, most = each.minimum, each.maximum
    if each.type == "seed":
        schema["x-seed"] = True
        least, most = max(least or 0, 0), SEED_MAX if most is None else min(most, SEED_MAX)
    for name, value in (("minimum", least), ("maximum", most), ("x-step", each.step)):
        if value is not None:
            schema[name] = value
    return schema


def _is_needed(each: Property, overrides: Mapping[str, Any]) -> bool:
    has_value = overrides.get(each.name) is not None or each.default is not None
    return bool(each.required) and not has_value and each.type != "seed"
