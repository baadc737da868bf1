"""Serves the example images and videos of effects, and builds their URLs for responses.

Examples are public, so no key is required. Their names are never reused, so responses can be cached
forever.
"""

from collections.abc import Iterable, Iterator

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from comfyfleet.api.jobs import Example, ExampleMedia
from comfyfleet.errors import NotFound
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog.model import EXAMPLE_NAME, EffectExample, ExampleFile
from comfyfleet.server.catalog.service import ExampleIndex
from comfyfleet.server.http.deps import NowDep, PlaneDep
from comfyfleet.server.http.objects import SECURITY_HEADERS, requested_range
from comfyfleet.server.http.tallies import counted_chunks, downloads_of

EXAMPLES_PATH = "/api/effect-examples"
CACHED = {
    "cache-control": "public, max-age=31536000, immutable",
    "cross-origin-resource-policy": "cross-origin",
}
router = APIRouter(include_in_schema=False)


@router.get(EXAMPLES_PATH + "/{name}", response_class=Response)
async def show_example(name: str, request: Request, plane: PlaneDep, now: NowDep) -> Response:
    index: ExampleIndex = request.app.state.examples
    is_name = EXAMPLE_NAME.fullmatch(name) is not None
    file = await index.find(plane.central, name, now=now) if is_name else None
    if file is None:
        raise NotFound("this example was not found")
    etag = f'"{file.name}"'
    part = requested_range(request.headers, size=file.size, etag=etag)
    headers = {**SECURITY_HEADERS, **CACHED, **part.headers(file.size)}
    headers |= {"etag": etag, "accept-ranges": "bytes", "content-type": file.content_type}
    if not part.length:
        return Response(status_code=part.status, headers=headers)
    headers["content-length"] = str(part.length)
    slot = downloads_of(request).begin(file.key)
    chunks = plane.store.chunks(file.key, start=part.start, length=part.length)
    return StreamingResponse(counted_chunks(chunks, slot), part.status, headers)


def example_views(plane: ControlPlane, examples: Iterable[EffectExample]) -> Iterator[Example]:
    for example in examples:
        yield Example(before=_view(plane, example.before), after=_view(plane, example.after))


def _view(plane: ControlPlane, file: ExampleFile | None) -> ExampleMedia | None:
    if file is None:
        return None
    return ExampleMedia(
        url=f"{plane.settings.public_url.rstrip('/')}{EXAMPLES_PATH}/{file.name}",
        content_type=file.content_type,
        size=file.size,
        width=file.width,
        height=file.height,
    )
