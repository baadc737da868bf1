"""What callers send: bodies without unknown fields, numbers and texts that every database can keep."""

from collections.abc import Iterator
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from comfyfleet.kernel.texts import problem_with_text

INTEGER_MAX = 2**31 - 1
VersionNumber: TypeAlias = Annotated[int, Field(ge=1, le=INTEGER_MAX)]
# Which of a fan-out's items.
ItemIndex: TypeAlias = Annotated[int, Field(ge=0, le=INTEGER_MAX)]
# An amount of tokens: neither true nor a text that looks like a number is money.
Tokens: TypeAlias = Annotated[int, Field(strict=True)]
UNKNOWN_FIELD = "unknown_field"


class Body(BaseModel):
    """What operators and customers send. A field that we don't know is refused: it may be a
    misspelt limit, and what it was to limit would be spent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _knows_all_fields(cls, given: Any) -> Any:
        known = list(cls._names())
        unknown = [each for each in given if each not in known] if isinstance(given, dict) else []
        if unknown:
            raise PydanticCustomError(
                UNKNOWN_FIELD, "{said}", {"said": _unknown(unknown[0], known)}
            )
        return given

    @classmethod
    def _names(cls) -> Iterator[str]:
        for name, each in cls.model_fields.items():
            alias = each.validation_alias
            if isinstance(alias, AliasChoices):
                yield from (str(choice) for choice in alias.choices)
            else:
                yield alias if isinstance(alias, str) else name


def _unknown(name: object, known: list[str]) -> str:
    said = f"there is no field {str(name)[:100]!r}"
    close = get_close_matches(str(name), known, n=1)
    if close:
        return f"{said}; did you mean {close[0]!r}?"
    return f"{said}; there are {', '.join(known)}" if known else f"{said}, nor any other"


def _storable(text: str) -> str:
    if problem := problem_with_text(text):
        raise ValueError(problem)
    return text


Text: TypeAlias = Annotated[str, AfterValidator(_storable)]


def in_utc(moment: datetime) -> datetime:
    """A time without a zone is meant as UTC."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
