"""Properties of workflows, as operators send and read them."""

from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from comfyfleet.api.admin import PROPERTY_FORMATS, PROPERTY_TYPES, PropertyAnswer
from comfyfleet.server.catalog.model import Property

# Aliases of property types.
TYPES = {
    "image_path": "image",
    "video_path": "video",
    "audio_path": "audio",
    "string": "text",
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
}


class PropertyBody(BaseModel):
    """A property of a workflow. Unknown fields cause a warning in the response, because they may be
    misspelled."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = Field(
        description="The one named `input`, of image or video, takes the user's media."
    )
    # A str, not a Literal: an unknown type gets our own message, which lists the known ones.
    type: str = Field(json_schema_extra={"enum": list(PROPERTY_TYPES)})
    binding: str | None = Field(
        default=None, description='"<node id>.<input>", ids as in the prompt.'
    )
    placeholder: str | None = Field(
        default=None,
        description="Or a text in the document that is replaced by the value.",
    )
    default: Any = Field(
        default=None, description="Without it, a bound input keeps the document's value."
    )
    minimum: int | float | None = Field(
        default=None,
        validation_alias=AliasChoices("minimum", "min"),
        description="Else that of the node, for number and integer.",
    )
    maximum: int | float | None = Field(
        default=None, validation_alias=AliasChoices("maximum", "max")
    )
    step: int | float | None = Field(default=None, description="For those who draw a slider.")
    choices: list[str | int | float | bool] | None = Field(
        default=None,
        validation_alias=AliasChoices("choices", "options"),
        description="For a choice; else those of the node.",
    )
    required: bool | None = Field(
        default=None, description="Else: files, and placeholders without a default, are."
    )
    description: str = Field(default="", description="For people.")
    label: str | None = Field(default=None, description="Its name in a form; else from the name.")
    # A str, like `type`, so that an unknown format gets our own message.
    format: str | None = Field(
        default=None,
        json_schema_extra={"enum": [*PROPERTY_FORMATS, None]},
        description="How people enter it: multiline (text), colour (text or integer), mask (image).",
    )

    @model_validator(mode="before")
    @classmethod
    def _with_our_spelling(cls, given: Any) -> Any:
        """Accepts an input as `node_id` and `field_name`, and its type as `param_type`."""
        if not isinstance(given, dict):
            return given
        field = dict(given)
        if {"node_id", "field_name"} <= field.keys() and "binding" not in field:
            field["binding"] = f"{field.pop('node_id')}.{field['field_name']}"
        if "field_name" in field:
            field.setdefault("name", field["field_name"])
            del field["field_name"]
        if isinstance(field.get("param_type"), str) and "type" not in field:
            kind = field.pop("param_type").lower()
            field["type"] = TYPES.get(kind, kind)
        return field

    def parsed(self) -> Property:
        values = {name: getattr(self, name) for name in type(self).model_fields}
        choices = None if self.choices is None else tuple(self.choices)
        return Property(**{**values, "choices": choices})

    def warnings(self) -> list[str]:
        unknown = sorted(self.model_extra or {})
        return [
            f"The property {self.name} has fields that we don't know: {', '.join(unknown)}."
        ] * (len(unknown) > 0)


def property_answer(each: Property) -> PropertyAnswer:
    return PropertyAnswer(
        name=each.name,
        type=each.type,
        binding=each.binding,
        placeholder=each.placeholder,
        default=each.default,
        minimum=each.minimum,
        maximum=each.maximum,
        step=each.step,
        choices=None if each.choices is None else list(each.choices),
        required=bool(each.required),
        description=each.description,
        label=each.label,
        format=each.format,
    )
