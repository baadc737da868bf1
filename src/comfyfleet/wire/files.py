"""Files on the wire: always by a URL that a held lease can have renewed."""

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

NAME_CHARACTERS_MAX = 200
ROW_ID_MAX = 2**63 - 1
# A number that a database can keep: of a row, or of bytes.
RowId: TypeAlias = Annotated[int, Field(ge=0, le=ROW_ID_MAX)]
WANTED_MAX = 500


class Message(BaseModel):
    """Unknown fields are let through: either side may be a little newer than the other."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Asset(Message):
    """A file that the worker hands to its backend; the name it gets there goes to `binding`."""

    name: str
    filename: str
    url: str
    content_hash: str | None = None
    size: int | None = None
    binding: str | None = None  # node.input
    placeholder: str | None = None  # or a text that stands somewhere in the prompt
    is_primary_input: bool = False


class OutputSlot(Message):
    """Where one output goes."""

    name: str
    method: Literal["PUT"] = "PUT"
    url: str
    headers: dict[str, str] = Field(default_factory=dict)


class WantedOutput(Message):
    name: str = Field(min_length=1, max_length=NAME_CHARACTERS_MAX)
    content_type: str = "application/octet-stream"


class DeliveredOutput(Message):
    name: str = Field(min_length=1, max_length=NAME_CHARACTERS_MAX)
    size: RowId
    content_type: str = "application/octet-stream"
    content_hash: str | None = None
    filename: str | None = None  # as the backend named it
    node_id: str | None = None
    kind: str | None = None  # images, gifs, audio … as the node sorted it
    width: int | None = Field(default=None, ge=0)  # of a picture
    height: int | None = Field(default=None, ge=0)
    is_stripped: bool = False  # of prompts and workflows; else we do it
