"""Routes for a user's uploads and media."""

from datetime import datetime, timedelta
from typing import Annotated, NamedTuple
from uuid import UUID

from fastapi import Depends, Query, Response, status
from pydantic import AliasChoices, Field, model_validator

from comfyfleet.api.media import (
    RESULTS_MAX,
    MediaKind,
    MediaResult,
    MediaStatus,
    Upload,
    UploadedFile,
    UploadPart,
    UploadSlot,
    UploadState,
    Video,
    Videos,
    VideoSummary,
)
from comfyfleet.api.values import ROW_ID_MAX, text_of
from comfyfleet.server import ingest
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.db import Tx
from comfyfleet.server.http.deps import NowDep, PlaneDep, problems
from comfyfleet.server.http.public import views
from comfyfleet.server.http.public.auth import (
    PAGE_USUAL,
    Body,
    FetchLimiterDep,
    Limit,
    Reader,
    Text,
    Writer,
    public_router,
)
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.jobs.files import ANNOUNCED_SIZE
from comfyfleet.server.jobs.model import Job
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import (
    FILENAME_CHARACTERS_MAX,
    File,
    MediaFilter,
    MediaItem,
    canonical_type,
    status_of,
)
from comfyfleet.server.storage import PresignedUrl
from comfyfleet.transport.ssrf import URL_CHARACTERS_MAX

router = public_router("videos")


class NewUpload(Body):
    filename: Text = Field(
        min_length=1,
        max_length=FILENAME_CHARACTERS_MAX,
        description="The file name for display. It is never used as a path.",
        examples=["cat.png"],
    )
    content_type: Text = Field(
        max_length=200,
        validation_alias=AliasChoices("content_type", "mime_type"),
        examples=["image/png"],
    )
    size: int = Field(
        ge=1, le=ROW_ID_MAX, description="The file size in bytes.", examples=[204_800]
    )
    effect_id: UUID | None = Field(
        default=None, description="Checks the type and size against the limits of this effect."
    )
    in_parts: bool = Field(
        default=False,
        description="Whether to upload in parts, so that an interrupted upload can be resumed.",
    )


@router.post("/videos/uploads", status_code=status.HTTP_201_CREATED, responses=problems(404))
async def announce(body: NewUpload, plane: PlaneDep, now: NowDep, caller: Writer) -> Upload:
    """Announces an upload, and returns a URL to which an image, video or audio file of exactly this
    type and size can be uploaded with PUT."""
    ingest.kind_named(body.content_type)
    ingest.check_size(plane, body.size)
    if body.effect_id is not None:
        async with plane.central.read() as tx:
            offer = await catalog.resolve(tx, body.effect_id)
        most = plane.settings.max_upload_bytes
        offer.check_upload(canonical_type(body.content_type), body.size, at_most_bytes=most)
    file, put = await ingest.create_upload(
        plane,
        caller,
        ingest.UploadRequest(body.filename, body.content_type, body.size, body.in_parts),
    )
    parts = await ingest.upload_parts(plane, file)
    return Upload(
        file_id=file.id,
        file=UploadedFile(
            id=file.id,
            filename=body.filename,
            content_type=canonical_type(body.content_type),
            size=body.size,
        ),
        upload=_slot(put),
        parts=tuple(map(_part, parts)),
        expires_at=now + timedelta(seconds=plane.settings.url_seconds),
    )


@router.get("/videos/uploads/{file_id}", responses=problems(404))
async def show_upload(file_id: UUID, plane: PlaneDep, now: NowDep, caller: Writer) -> UploadState:
    """Returns the parts of an upload, with new URLs for the missing parts. Use it to resume an
    interrupted upload."""
    progress = await ingest.upload_progress(plane, caller, file_id)
    return UploadState(
        file_id=file_id,
        size=progress.file.metadata[ANNOUNCED_SIZE],
        received_bytes=progress.received_bytes,
        is_whole=progress.is_whole
        or bool(progress.parts and not any(part.put for part in progress.parts)),
        parts=tuple(map(_part, progress.parts)),
        expires_at=now + timedelta(seconds=plane.settings.url_seconds),
    )


def _slot(put: PresignedUrl) -> UploadSlot:
    return UploadSlot(method=put.method, url=put.url, headers=dict(put.headers))


def _part(part: ingest.UploadedPart) -> UploadPart:
    return UploadPart(
        number=part.number,
        start=part.start,
        size=part.size,
        upload=_slot(part.put) if part.put else None,
    )


class NewVideo(Body):
    """The source of a new media item: either an uploaded file or a URL."""

    file_id: UUID | None = Field(
        default=None,
        validation_alias=AliasChoices("file_id", "original_file_id"),
        description="The id of an uploaded file. `original_file_id` is accepted as well.",
    )
    url: Text | None = Field(
        default=None,
        max_length=URL_CHARACTERS_MAX,
        description="An http or https URL to fetch the file from. Its host must have a public "
        "address.",
        examples=["https://pictures.example/cat.png"],
    )

    @model_validator(mode="after")
    def _one(self) -> "NewVideo":
        if (self.file_id is None) == (self.url is None):
            raise ValueError("send either file_id or url")
        return self


@router.post(
    "/videos",
    status_code=status.HTTP_201_CREATED,
    responses={
        200: {"model": Video, "description": "The file already belongs to a media item"},
        **problems(404, 409),
    },
)
async def link(
    body: NewVideo,
    plane: PlaneDep,
    now: NowDep,
    caller: Writer,
    fetches: FetchLimiterDep,
    response: Response,
) -> Video:
    """Creates a media item from a URL, or from an uploaded file whose content matches the announced
    type and size."""
    if body.file_id is not None:
        item, is_new = await ingest.attach(plane, caller, body.file_id)
    else:
        with fetches.slot(caller.user_id):
            item, is_new = await ingest.fetch_from_url(plane, caller, body.url or ""), True
    response.status_code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
    async with plane.pools[caller.tenant.pool].read() as tx:
        details = await _read_details(tx, item)
    return await _video(plane, details, now=now)


async def _media_filter(
    kind: Annotated[MediaKind | None, Query(description="Only media of this kind.")] = None,
    status: Annotated[MediaStatus | None, Query(description="Only media with this status.")] = None,
    effect_id: Annotated[
        UUID | None, Query(description="Only media with a job of this effect.")
    ] = None,
    q: Annotated[
        Text | None,
        Query(max_length=100, description="Only media whose file name contains this text."),
    ] = None,
) -> MediaFilter:
    return MediaFilter(kind, status, effect_id, q or None)


@router.get("/videos", responses=problems(404))
async def list_videos(
    plane: PlaneDep,
    caller: Reader,
    wanted: Annotated[MediaFilter, Depends(_media_filter)],
    urls: Annotated[bool, Query(description="Whether to include file URLs.")] = False,
    before: UUID | None = None,
    limit: Limit = PAGE_USUAL,
) -> Videos:
    """Lists your media, newest first. To see all results of a media item, retrieve it by its id."""
    async with plane.pools[caller.tenant.pool].read() as tx:
        items = await media.list_media(
            tx,
            caller.tenant.id,
            caller.user_id,
            before_id=before,
            limit=limit + 1,
            wanted=wanted,
        )
        page = items[:limit]
        latest = await jobs.get_many(
            tx, caller.tenant.id, [item.job_id for item in page if item.job_id]
        )
        items_with_jobs = [
            (item, latest.get(item.job_id) if item.job_id else None) for item in page
        ]
        ids = {file_id for item, _ in items_with_jobs for file_id in item.file_ids}
        ids |= {job.output_file_id for _, job in items_with_jobs if job and job.output_file_id}
        files = await media.find_existing(tx, caller.tenant.id, ids)
    details = [MediaDetails(item, job, [], files) for item, job in items_with_jobs]
    return Videos(
        videos=tuple(
            [await _summary(plane, item_details, has_urls=urls) for item_details in details]
        ),
        next=page[-1].id if len(items) > limit else None,
    )


@router.get("/videos/{video_id}", responses=problems(404))
async def show(video_id: UUID, plane: PlaneDep, now: NowDep, caller: Reader) -> Video:
    """Returns a media item with its status and results."""
    async with plane.pools[caller.tenant.pool].read() as tx:
        item = await media.get_media(tx, caller.tenant.id, caller.user_id, video_id)
        details = await _read_details(tx, item)
    return await _video(plane, details, now=now)


class MediaDetails(NamedTuple):
    """A media item with its jobs and all their files."""

    media: MediaItem
    job: Job | None
    jobs: list[Job]
    files: dict[UUID, File]

    def file(self, file_id: UUID | None) -> File | None:
        return self.files.get(file_id) if file_id else None


async def _read_details(tx: Tx, item: MediaItem) -> MediaDetails:
    item_jobs = await jobs.list_of_media(tx, item.tenant_id, item.id, limit=RESULTS_MAX)
    file_ids = {*item.file_ids, *(job.output_file_id for job in item_jobs if job.output_file_id)}
    files = await media.find_existing(tx, item.tenant_id, file_ids)
    latest = next((job for job in item_jobs if job.id == item.job_id), None)
    if latest is None and item.job_id:
        latest = (await jobs.get_many(tx, item.tenant_id, [item.job_id])).get(item.job_id)
    return MediaDetails(item, latest, item_jobs, files)


async def _summary(plane: ControlPlane, seen: MediaDetails, *, has_urls: bool) -> VideoSummary:
    item, job = seen.media, seen.job
    original = seen.file(item.original_file_id)
    processed = seen.file(job.output_file_id) if job else None
    return VideoSummary(
        id=item.id,
        kind=item.kind,
        status=status_of(item, job.shown_status if job else None),
        progress=views.percent_of(plane, job) if job else None,
        error=job.error_message if job else None,
        job_id=item.job_id,
        effect_id=job.spec.effect_id if job else None,
        filename=original.filename if original else None,
        original_file_url=await views.url_of(plane, original) if has_urls and original else None,
        processed_file_url=(
            await views.url_of(plane, processed) if has_urls and processed else None
        ),
        original_small_url=views.small_url_of(plane, original) if has_urls else None,
        processed_small_url=views.small_url_of(plane, processed) if has_urls else None,
        processed_content_type=processed.mime_type if processed else None,
        created_at=item.created_at,
        expired_at=item.expired_at,
    )


async def _video(plane: ControlPlane, seen: MediaDetails, *, now: datetime) -> Video:
    job = seen.job
    return Video(
        **(await _summary(plane, seen, has_urls=True)).model_dump(),
        estimated_seconds_left=await views.seconds_left(plane, job, now) if job else None,
        values=views.values_of(job) if job else (),
        text=text_of(job.values) if job else None,
        results=tuple([await _result(plane, item_job, seen) for item_job in seen.jobs]),
    )


async def _result(plane: ControlPlane, job: Job, seen: MediaDetails) -> MediaResult:
    file = seen.file(job.output_file_id)
    return MediaResult(
        job_id=job.id,
        effect_id=job.spec.effect_id,
        status=job.status,
        url=await views.url_of(plane, file) if file else None,
        small_url=views.small_url_of(plane, file),
        content_type=file.mime_type if file else None,
        submitted_at=job.submitted_at,
    )
