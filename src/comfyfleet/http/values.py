"""Numbers and texts of callers, within what every database can keep."""

from datetime import UTC, datetime
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field

from comfyfleet.kernel.texts import problem_with_text

INTEGER_MAX = 2**31 - 1
VersionNumber: TypeAlias = Annotated[int, Field(ge=1, le=INTEGER_MAX)]
# Which of a fan-out's items.
ItemIndex: TypeAlias = Annotated[int, Field(ge=0, le=INTEGER_MAX)]


def _storable(text: str) -> str:
    if problem := problem_with_text(text):
        raise ValueError(problem)
    return text


Text: TypeAlias = Annotated[str, AfterValidator(_storable)]


def in_utc(moment: datetime) -> datetime:
    """A time without a zone is meant as UTC."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
