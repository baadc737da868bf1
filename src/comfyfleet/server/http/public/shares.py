"""Routes for links that show results to people without a key."""

from datetime import datetime, timedelta
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Path, Request, Response, status
from pydantic import Field

from comfyfleet.api.media import (
    MadeShare,
    ShareAnswer,
    SharedAnswer,
    SharedFile,
    SharedState,
    Shares,
)
from comfyfleet.errors import Conflict, NotFound, Refused
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.db import Tx
from comfyfleet.server.http.deps import NowDep, PlaneDep, problems
from comfyfleet.server.http.middleware import SHARED_PATH
from comfyfleet.server.http.objects import CORS_HEADERS, object_response
from comfyfleet.server.http.public import views
from comfyfleet.server.http.public.auth import (
    PAGE_USUAL,
    Body,
    Limit,
    Reader,
    Writer,
    admit_stranger,
    public_router,
)
from comfyfleet.server.http.tallies import open_download
from comfyfleet.server.jobs import customer
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.jobs.files import suffix_of
from comfyfleet.server.jobs.model import Job, JobStatus
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import (
    File,
    SharedLink,
    new_share_secret,
    replace_suffix,
    tenant_of_share,
)
from comfyfleet.server.secrets import hash_key
from comfyfleet.server.storage.local import LocalStore
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.model import Caller, Tenant

router = public_router("shares")
EXPIRES_SECONDS_MIN = 60
EXPIRES_SECONDS_MAX = 365 * 24 * 3600
EXPIRES_SECONDS = 7 * 24 * 3600
ORIGINAL = "original"
# Lifetime in seconds of the S3 URLs to which file requests are redirected.
REDIRECT_SECONDS = 60
# Path of the web page that shows a link's result.
PAGE_PATH = "/shared"
PRIVATE_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Robots-Tag": "noindex",
}


class NewShare(Body):
    expires_in: int = Field(
        default=EXPIRES_SECONDS,
        ge=EXPIRES_SECONDS_MIN,
        le=EXPIRES_SECONDS_MAX,
        description="Seconds until the link expires.",
        examples=[EXPIRES_SECONDS],
    )
    has_original: bool = Field(
        default=False, description="Whether the link also shows the input, as a before and after."
    )


class NewMediaShare(NewShare):
    job_id: UUID | None = Field(
        default=None,
        description="The job whose result to share. The default is the media item's latest job.",
    )


@router.post(
    "/videos/{video_id}/shares",
    status_code=status.HTTP_201_CREATED,
    responses=problems(404),
    name="share",
)
async def share_media(
    video_id: UUID, body: NewMediaShare, plane: PlaneDep, now: NowDep, caller: Writer
) -> MadeShare:
    """Creates a link to a media item's result. Anyone with the link can see the result until the
    link expires or is revoked."""
    async with plane.pools[caller.tenant.pool].read() as tx:
        item = await media.get_media(tx, caller.tenant.id, caller.user_id, video_id)
    job_id = body.job_id or item.job_id
    if job_id is None:
        raise Refused("the media item has no result yet", field="video_id")
    job = await customer.get_job(plane.context, caller.tenant.id, caller.user_id, job_id)
    if job.spec.video_id != video_id:
        raise NotFound(f"media item {video_id} has no job {job_id}")
    return await _share(plane, caller, job, body, now)


@router.post(
    "/ai-jobs/{job_id}/shares",
    status_code=status.HTTP_201_CREATED,
    responses=problems(404),
    name="share",
)
async def share_job(
    job_id: UUID, body: NewShare, plane: PlaneDep, now: NowDep, caller: Writer
) -> MadeShare:
    """Creates a link to a job's result. The job doesn't need to have input media."""
    job = await customer.get_job(plane.context, caller.tenant.id, caller.user_id, job_id)
    return await _share(plane, caller, job, body, now)


async def _share(
    plane: ControlPlane, caller: Caller, job: Job, body: NewShare, now: datetime
) -> MadeShare:
    if job.status != JobStatus.COMPLETED or not job.outputs:
        raise Refused("only completed jobs with files can be shared", status=job.status)
    secret = new_share_secret(caller.tenant.id)
    share = SharedLink(
        id=plane.context.new_id(),
        tenant_id=caller.tenant.id,
        user_id=caller.user_id,
        job_id=job.id,
        video_id=job.spec.video_id,
        has_original=body.has_original,
        secret_hash=hash_key(secret),
        created_at=now,
        expires_at=now + timedelta(seconds=body.expires_in),
    )
    async with plane.pools[caller.tenant.pool].transaction() as tx:
        await media.create_share(tx, share, now=now)
    url = f"{plane.settings.public_url.rstrip('/')}{PAGE_PATH}/{secret}"
    return MadeShare(**_answer(share).model_dump(), secret=secret, url=url)


@router.get("/videos/{video_id}/shares", responses=problems(404), name="list")
async def list_media_shares(
    video_id: UUID,
    plane: PlaneDep,
    caller: Reader,
    before: UUID | None = None,
    limit: Limit = PAGE_USUAL,
) -> Shares:
    """Lists the links to a media item's results, without their secrets."""
    async with plane.pools[caller.tenant.pool].read() as tx:
        await media.get_media(tx, caller.tenant.id, caller.user_id, video_id)
    return await _page(plane, caller, before, limit, video_id=video_id)


@router.get("/shares", responses=problems(404), name="list")
async def list_shares(
    plane: PlaneDep, caller: Reader, before: UUID | None = None, limit: Limit = PAGE_USUAL
) -> Shares:
    """Lists all your links, without their secrets."""
    return await _page(plane, caller, before, limit)


@router.delete("/shares/{share_id}", responses=problems(404))
async def revoke(share_id: UUID, plane: PlaneDep, now: NowDep, caller: Writer) -> ShareAnswer:
    """Revokes a link and the URLs of its files. Repeated calls have no effect. If files are stored
    in S3, a URL to which a visitor was already redirected stays valid for up to a minute."""
    async with plane.pools[caller.tenant.pool].transaction() as tx:
        revoked = await media.revoke_share(tx, caller.tenant.id, caller.user_id, share_id, now=now)
    return _answer(revoked)


async def _page(
    plane: ControlPlane,
    caller: Caller,
    before: UUID | None,
    limit: int,
    video_id: UUID | None = None,
) -> Shares:
    async with plane.pools[caller.tenant.pool].read() as tx:
        links = await media.list_shares(
            tx,
            caller.tenant.id,
            caller.user_id,
            video_id=video_id,
            before_id=before,
            limit=limit + 1,
        )
    page = links[:limit]
    return Shares(
        shares=tuple(map(_answer, page)), next=page[-1].id if len(links) > limit else None
    )


def _answer(share: SharedLink) -> ShareAnswer:
    return ShareAnswer(
        id=share.id,
        job_id=share.job_id,
        video_id=share.video_id,
        has_original=share.has_original,
        created_at=share.created_at,
        expires_at=share.expires_at,
        revoked_at=share.revoked_at,
    )


# These routes require no key, because the link's secret authorizes the request.
shared_router = APIRouter(tags=["shares"], responses=problems(404, 429, 503))


@shared_router.get(f"{SHARED_PATH}/{{secret}}")
async def show_shared(
    secret: Annotated[str, Path(max_length=100, description="The link's secret.")],
    request: Request,
    response: Response,
    plane: PlaneDep,
    now: NowDep,
) -> SharedAnswer:
    """Returns the results that a link shows. No key is required."""
    admit_stranger(request, now)
    response.headers.update(PRIVATE_HEADERS)
    share, tenant = await _find(plane, secret)
    if not share.is_open(now):
        return _expired(share)
    async with plane.pools[tenant.pool].read() as tx:
        job = await jobs.get(tx, share.tenant_id, share.job_id)
    original, named = await views.original_and_outputs(plane, job)
    files = [file for _, file in named]
    if not files:
        return _expired(share)
    # If the original isn't shared, the response must not reveal its name either.
    shown = original if share.has_original else None
    names = await views.download_names(plane, job, shown, files)
    base = f"{plane.settings.public_url.rstrip('/')}{SHARED_PATH}/{secret}/files"
    return SharedAnswer(
        state=SharedState.READY,
        effect_title=await _title(plane, job),
        original=_file(shown, f"{base}/{ORIGINAL}") if shown else None,
        outputs=tuple(
            _file(file, f"{base}/{number}", names.get(file.id)) for number, file in enumerate(files)
        ),
        created_at=share.created_at,
        expires_at=share.expires_at,
    )


async def _find(plane: ControlPlane, secret: str) -> tuple[SharedLink, Tenant]:
    tenant_id = tenant_of_share(secret)
    if tenant_id is None:
        raise _missing()
    try:
        async with plane.central.read() as tx:
            tenant = await tenants.require_kept(tx, tenant_id)
    except (NotFound, Conflict):
        raise _missing() from None
    async with plane.pools[tenant.pool].read() as tx:
        share = await media.find_share(tx, tenant_id, secret)
        is_shown = share is not None and await _is_of_active_user(tx, share)
    if share is None or not is_shown:
        raise _missing()
    return share, tenant


async def _is_of_active_user(tx: Tx, share: SharedLink) -> bool:
    """Checks whether the link's owner is active. Links of deactivated users don't work."""
    try:
        return (await tenants.get_user(tx, share.tenant_id, share.user_id)).is_active
    except NotFound:
        return False


def _missing() -> NotFound:
    return NotFound("this link doesn't exist or was revoked")


def _expired(share: SharedLink) -> SharedAnswer:
    return SharedAnswer(
        state=SharedState.EXPIRED, created_at=share.created_at, expires_at=share.expires_at
    )


async def _title(plane: ControlPlane, job: Job) -> str | None:
    effect_id = job.spec.effect_id
    if effect_id is None:
        return None
    async with plane.central.read() as tx:
        effect = (await catalog.get_effects(tx, [effect_id])).get(effect_id)
    return effect.settings.title if effect else None


def _file(file: File, url: str, name: str | None = None) -> SharedFile:
    return SharedFile(filename=name or _shown_name(file), content_type=file.mime_type, url=url)


def _shown_name(file: File) -> str:
    """Returns the file's name with a suffix that matches its content type. The name itself was
    chosen by the owner and may have any suffix."""
    return replace_suffix(file.filename, suffix_of(file.filename, file.mime_type))


@shared_router.get(f"{SHARED_PATH}/{{secret}}/files/{{which}}", include_in_schema=False)
async def show_shared_file(
    secret: Annotated[str, Path(max_length=100)],
    which: Annotated[str, Path(max_length=10)],
    request: Request,
    plane: PlaneDep,
    now: NowDep,
) -> Response:
    """Returns a file of a link. The link is checked on each request, so a revoked link stops
    working immediately.

    Requests for files in S3 are redirected to a URL that is valid for one minute.
    """
    admit_stranger(request, now)
    share, tenant = await _find(plane, secret)
    if not share.is_open(now):
        raise _missing()
    async with plane.pools[tenant.pool].read() as tx:
        job = await jobs.get(tx, share.tenant_id, share.job_id)
    original, named = await views.original_and_outputs(plane, job)
    shown = original if share.has_original else None
    files = {str(number): file for number, (_, file) in enumerate(named)}
    if shown:
        files[ORIGINAL] = shown
    file = files.get(which)
    if file is None:
        raise _missing()
    names = await views.download_names(plane, job, shown, [file for _, file in named])
    name = _shown_name(file) if which == ORIGINAL else names.get(file.id) or _shown_name(file)
    if isinstance(plane.store, LocalStore):
        download = await open_download(request, plane.store, file.path)
        return object_response(download, request.headers, filename=name, others=CORS_HEADERS)
    url = await plane.store.url_to_get(file.path, seconds=REDIRECT_SECONDS, filename=name)
    headers = {**CORS_HEADERS, **PRIVATE_HEADERS, "location": url}
    return Response(status_code=status.HTTP_302_FOUND, headers=headers)
