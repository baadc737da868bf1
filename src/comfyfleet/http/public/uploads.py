"""Files on their way in: announced here, sent by the customer straight to the store."""

from datetime import datetime, timedelta
from uuid import UUID

from fastapi import status
from pydantic import Field

from comfyfleet.effects.catalogue import service as catalogue
from comfyfleet.files.model import FILENAME_CHARACTERS_MAX
from comfyfleet.http.given import GivenNow, GivenPlane
from comfyfleet.http.problems import problems
from comfyfleet.http.public import arriving
from comfyfleet.http.public.auth import Writer
from comfyfleet.http.public.routing import Answer, Body, Text, public_router
from comfyfleet.media.kinds import canonical
from comfyfleet.wire.files import ROW_ID_MAX

router = public_router("videos")


class NewUpload(Body):
    filename: Text = Field(
        min_length=1,
        max_length=FILENAME_CHARACTERS_MAX,
        description="For show; it never becomes a path.",
        examples=["cat.png"],
    )
    content_type: Text = Field(max_length=200, examples=["image/png"])
    size: int = Field(ge=1, le=ROW_ID_MAX, description="In bytes.", examples=[204_800])
    effect_id: UUID | None = Field(
        default=None, description="If told, type and size are held against what the effect takes."
    )


class UploadSlot(Answer):
    method: str = Field(examples=["PUT"])
    url: str
    headers: dict[str, str] = Field(
        description="To be sent as they are.", examples=[{"Content-Type": "image/png"}]
    )


class Upload(Answer):
    file_id: UUID = Field(description="What POST /api/videos links once the bytes are there.")
    upload: UploadSlot
    expires_at: datetime = Field(description="Until when the URL can be used.")


@router.post("/videos/uploads", status_code=status.HTTP_201_CREATED, responses=problems(404))
async def announce(body: NewUpload, plane: GivenPlane, now: GivenNow, caller: Writer) -> Upload:
    """A URL to PUT a picture, a video or a sound to, of exactly this type and size."""
    arriving.kind_named(body.content_type)
    arriving.check_size(plane, body.size)
    if body.effect_id is not None:
        async with plane.central.look() as tx:
            offer = await catalogue.offer_of(tx, body.effect_id)
        most = plane.settings.max_upload_bytes
        offer.check_upload(canonical(body.content_type), body.size, at_most_bytes=most)
    file, put = await arriving.announce(
        plane, caller, arriving.Announcement(body.filename, body.content_type, body.size)
    )
    return Upload(
        file_id=file.id,
        upload=UploadSlot(method=put.method, url=put.url, headers=dict(put.headers)),
        expires_at=now + timedelta(seconds=plane.settings.url_seconds),
    )
