"""A property on the wire: what an operator says of a named input."""

from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from comfyfleet.effects.model import PROPERTY_TYPES, Property, PropertyType
from comfyfleet.http.admin.routing import Answer


class PropertyBody(BaseModel):
    """Fields that we don't know are told in the answer's warnings: they may be misspelt."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = Field(
        description="The one named `input`, of image or video, takes the user's media."
    )
    # A text, so that a type that isn't one is told in a sentence, with all that there are.
    type: str = Field(json_schema_extra={"enum": list(PROPERTY_TYPES)})
    binding: str | None = Field(
        default=None, description='"<node id>.<input>", ids as in the prompt.'
    )
    placeholder: str | None = Field(
        default=None,
        description="Or a text that stands in the document, and is replaced as a value.",
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

    def parsed(self) -> Property:
        said = {name: getattr(self, name) for name in type(self).model_fields}
        choices = None if self.choices is None else tuple(self.choices)
        return Property(**{**said, "choices": choices})

    def warnings(self) -> list[str]:
        unknown = sorted(self.model_extra or {})
        return [
            f"The property {self.name} has fields that we don't know: {', '.join(unknown)}."
        ] * (len(unknown) > 0)


class PropertyAnswer(Answer):
    name: str
    type: PropertyType
    binding: str | None
    placeholder: str | None
    default: Any
    minimum: int | float | None
    maximum: int | float | None
    step: int | float | None
    choices: list[Any] | None
    required: bool
    description: str


def answer_of(each: Property) -> PropertyAnswer:
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
    )
