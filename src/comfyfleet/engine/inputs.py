"""Which inputs a node declares, with growing groups and dependent choices written out."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

GROWING = "COMFY_AUTOGROW_V3"
DEPENDENT = "COMFY_DYNAMICCOMBO_V3"
ANYTHING = {"*", "COMFY_MATCHTYPE_V3"}

Kind = str | list[Any]


@dataclass(frozen=True, slots=True)
class Declared:
    """One input: a type name or the list of its choices, and its options."""

    kind: Kind
    options: Mapping[str, Any]
    required: bool

    @property
    def config(self) -> list[Any]:
        return [self.kind, dict(self.options)]

    @property
    def choices(self) -> list[Any] | None:
        """What may be chosen, or None when it is no choice."""
        if isinstance(self.kind, list):
            return self.kind
        return list(self.options.get("options", [])) if self.kind == "COMBO" else None


def is_link(value: object) -> TypeGuard[list[Any]]:
    """Whether the executor follows this value to another node."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    return isinstance(value[0], str) and isinstance(value[1], int | float)


def declared_inputs(groups: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Declared]:
    """All inputs of a node by their full names, for the values that were given."""
    return dict(_entries(groups, given, prefix=""))


def _entries(
    groups: Mapping[str, Any], given: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Declared]]:
    for category in ("required", "optional"):
        for name, config in groups.get(category, {}).items():
            yield from _entry(prefix + name, _declare(config, category), given)


def _entry(
    name: str, declared: Declared, given: Mapping[str, Any]
) -> Iterator[tuple[str, Declared]]:
    if declared.kind == GROWING:
        yield from _slots(name, declared.options["template"])
    elif declared.kind == DEPENDENT:
        yield from _chosen(name, declared, given)
    else:
        yield name, declared


def _declare(config: list[Any], category: str) -> Declared:
    options = config[1] if len(config) > 1 else {}
    return Declared(kind=config[0], options=options, required=category == "required")


def _slots(name: str, template: Mapping[str, Any]) -> Iterator[tuple[str, Declared]]:
    """A growing group is only its slots: `images.image0`, `images.image1`…"""
    category, inputs = next((c, i) for c, i in template["input"].items() if i)
    slot = _declare(next(iter(inputs.values())), category)
    for index, slot_name in enumerate(_slot_names(template)):
        required = slot.required and index < template["min"]
        yield f"{name}.{slot_name}", Declared(slot.kind, slot.options, required)


def _slot_names(template: Mapping[str, Any]) -> list[str]:
    if "names" in template:
        return list(template["names"])
    return [f"{template['prefix']}{index}" for index in range(template["max"])]


def _chosen(
    name: str, declared: Declared, given: Mapping[str, Any]
) -> Iterator[tuple[str, Declared]]:
    """A dependent choice brings the inputs of its option; an unknown option brings nothing."""
    for option in declared.options["options"]:
        if name in given and option["key"] == given[name]:
            yield from _entries(option["inputs"], given, prefix=f"{name}.")
            yield name, declared
            return


def fits(received: Kind, wanted: Kind) -> bool:
    """Whether an output of type `received` may be linked to an input of type `wanted`."""
    if received == wanted:
        return True
    kinds = [kind for kind in (received, wanted) if isinstance(kind, str)]
    if ANYTHING & set(kinds):
        return True
    if isinstance(received, list):
        return wanted == "COMBO"
    return isinstance(wanted, str) and _overlap(received, wanted)


def _overlap(received: str, wanted: str) -> bool:
    left, right = ({part.strip() for part in kinds.split(",")} for kinds in (received, wanted))
    return "*" in left | right or bool(left & right)
