"""Properties as JSON Schema: it accepts exactly what a job accepts."""

import uuid
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.errors import InvalidValue
from comfyfleet.server.catalog.model import SEED_MAX, Property, json_schema_of, resolve_values

INPUT = Property("input", "image", binding="1.image", required=True)
PROPERTIES = (
    Property("what", "text", placeholder="__WHAT__", required=True, description="what to draw"),
    Property("strength", "number", binding="2.strength", minimum=0.25, maximum=2, step=0.25),
    Property("steps", "integer", binding="2.steps", default=20, minimum=1, maximum=50),
    Property("is_tiled", "boolean", binding="2.tiled"),
    Property("sampler", "choice", binding="2.sampler", choices=("euler", 2, 0.5)),
    Property("seed", "seed", binding="2.seed", required=True),
    Property("mask", "image", binding="3.image", default="mask.png"),
)


def is_valid(given: Any, overrides: dict[str, Any] | None = None) -> bool:
    schema = json_schema_of(PROPERTIES, overrides or {})
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    return bool(validator.is_valid(given))


def is_taken(given: dict[str, Any], overrides: dict[str, Any] | None = None) -> bool:
    try:
        resolve_values(PROPERTIES, given, overrides or {}, seed=1)
    except InvalidValue:
        return False
    return True


def test_a_form_can_be_built_from_it() -> None:
    assert json_schema_of(PROPERTIES, {"steps": 30, "what": None}) == {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "what": {
                "title": "What",
                "x-kind": "text",
                "type": "string",
                "maxLength": 1_000_000,
                "description": "what to draw",
            },
            "strength": {
                "title": "Strength",
                "x-kind": "number",
                "type": "number",
                "minimum": 0.25,
                "maximum": 2,
                "x-step": 0.25,
            },
            "steps": {
                "title": "Steps",
                "x-kind": "integer",
                "type": "integer",
                "minimum": 1,
                "maximum": 50,
                "default": 30,
            },
            "is_tiled": {"title": "Is tiled", "x-kind": "boolean", "type": "boolean"},
            "sampler": {"title": "Sampler", "x-kind": "choice", "enum": ["euler", 2, 0.5]},
            "seed": {
                "title": "Seed",
                "x-kind": "seed",
                "type": "integer",
                "x-seed": True,
                "minimum": 0,
                "maximum": SEED_MAX,
            },
            "mask": {
                "title": "Mask",
                "x-kind": "image",
                "type": "string",
                "format": "uuid",
                "x-media": "image",
            },
        },
        "required": ["what"],
        "additionalProperties": False,
    }


def test_it_is_a_schema_by_its_own_dialect() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema_of(PROPERTIES, {}))


def test_the_media_that_an_effect_is_applied_to_is_no_property() -> None:
    assert json_schema_of([INPUT], {})["properties"] == {}


def test_what_the_effect_sets_need_not_be_sent() -> None:
    assert not is_valid({})
    assert not is_taken({})
    assert is_valid({}, {"what": "a cat"})
    assert is_taken({}, {"what": "a cat"})


VALUES = {
    "what": st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), st.none()),
    "strength": st.one_of(st.floats(0, 3), st.integers(0, 3), st.booleans()),
    "steps": st.one_of(st.integers(-1, 60), st.sampled_from([3.0, 2.5, True, "7"])),
    "is_tiled": st.sampled_from([True, False, 0, 1, "true"]),
    "sampler": st.sampled_from(["euler", 2, 2.0, 0.5, True, "Euler"]),
    "seed": st.integers(-1, SEED_MAX + 1),
    "mask": st.sampled_from([str(uuid.UUID(int=7)), "mask.png", 7]),
    "nothing": st.just(1),
}


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_it_accepts_what_a_job_accepts(given: dict[str, Any]) -> None:
    # Left out on purpose: null means "not given" to us, and a NUL can't be stored.
    if any(value is None or "\0" in str(value) for value in given.values()):
        return
    assert is_valid(given) == is_taken(given)


@pytest.mark.parametrize("seed", [SEED_MAX, 0])
def test_the_whole_range_of_seeds_is_offered(seed: int) -> None:
    assert is_valid({"what": "x", "seed": seed})
