"""The properties of workflows in the operators' API."""

from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from comfyfleet.api.admin import PROPERTY_FORMATS, PROPERTY_TYPES, PropertyAnswer
from comfyfleet.server.catalog.model import Property

# Other accepted names of property types.
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
    """A property of a workflow. Unknown fields may be misspelled, so the response contains a
    warning about them."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = Field(
        description="The name. An image or video property named `input` gets the user's media."
    )
    # A str instead of a Literal, so that our own message about an unknown type lists all types.
    type: str = Field(json_schema_extra={"enum": list(PROPERTY_TYPES)})
    binding: str | None = Field(
        default=None,
        description='The input that gets the value, as "<node id>.<input>" with the prompt\'s ids.',
    )
    placeholder: str | None = Field(
        default=None,
        description="Instead of `binding`, a string in the document that the value replaces.",
    )
    default: Any = Field(
        default=None,
        description="The default value. Without one, a bound input keeps the document's value.",
    )
    minimum: int | float | None = Field(
        default=None,
        validation_alias=AliasChoices("minimum", "min"),
        description="The minimum of a number or integer. The default is the node's minimum.",
    )
    maximum: int | float | None = Field(
        default=None, validation_alias=AliasChoices("maximum", "max")
    )
    step: int | float | None = Field(default=None, description="The step size for a slider.")
    choices: list[str | int | float | bool] | None = Field(
        default=None,
        validation_alias=AliasChoices("choices", "options"),
        description="The values of a choice. The default is the node's list.",
    )
    required: bool | None = Field(
        default=None,
        description="Whether a value is required. By default, files and placeholders without a "
        "default are.",
    )
    description: str = Field(default="", description="A description for people.")
    label: str | None = Field(
        default=None, description="The label in forms. By default, it is derived from the name."
    )
    # A str instead of a Literal, so that our own message about an unknown format lists all formats.
    format: str | None = Field(
        default=None,
        json_schema_extra={"enum": [*PROPERTY_FORMATS, None]},
        description="The input control in forms: multiline (for text), colour (for text or "
        "integer) or mask (for image).",
    )

    @model_validator(mode="before")
    @classmethod
    def _with_our_spelling(cls, body: Any) -> Any:
        """Accepts `node_id` and `field_name` instead of `binding`, and `param_type` instead of
        `type`."""
        if not isinstance(body, dict):
            return body
        field = dict(body)
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
        return [f"The property {self.name} has unknown fields: {', '.join(unknown)}."] * (
            len(unknown) > 0
        )


def property_answer(prop: Property) -> PropertyAnswer:
    return PropertyAnswer(
        name=prop.name,
        type=prop.type,
        binding=prop.binding,
        placeholder=prop.placeholder,
        default=prop.default,
        minimum=prop.minimum,
        maximum=prop.maximum,
        step=prop.step,
        choices=None if prop.choices is None else list(prop.choices),
        required=bool(prop.required),
        description=prop.description,
        label=prop.label,
        format=prop.format,
    )
