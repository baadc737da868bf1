"""Whole numbers of callers, no larger than the databases keep them."""

from typing import Annotated, TypeAlias

from pydantic import Field

INTEGER_MAX = 2**31 - 1
VersionNumber: TypeAlias = Annotated[int, Field(ge=1, le=INTEGER_MAX)]
# Which of a fan-out's items.
ItemIndex: TypeAlias = Annotated[int, Field(ge=0, le=INTEGER_MAX)]
