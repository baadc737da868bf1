"""Which API a server has, found out by asking for a job that can't be there."""

from typing import Literal

from comfyfleet.comfy.calls import Call, Calls, json_of
from comfyfleet.comfy.cloud.complaints import complaint_in
from comfyfleet.comfy.cloud.patience import ask
from comfyfleet.comfy.shapes import cut, mapping_in, unexpected
from comfyfleet.kernel.errors import AccessDenied

Api = Literal["v1", "v2"]

NOBODYS_JOB = "00000000-0000-0000-0000-000000000000"
NO_SUCH_ROUTE = frozenset({404, 405, 501})


async def probe(v1: Calls, v2: Calls) -> Api:
    """Raises AccessDenied, ServerUnavailable and UnexpectedAnswer; nothing is settled then."""
    call = Call("GET", "/jobs/{id}", f"/jobs/{NOBODYS_JOB}")
    try:
        response = await ask(v2, call)
    except AccessDenied:
        # A door before all routes may know the keys of v1 only.
        return await _by_v1(v1)
    # Both say 404: v2 for the job, in its envelope; v1 for the route.
    if complaint_in(response.content).has_envelope:
        return "v2"
    if response.status_code in NO_SUCH_ROUTE:
        return await _by_v1(v1)
    with v2.reading(call.operation):
        raise unexpected(f"{call.operation} was answered {response.status_code}", response.text)


async def _by_v1(v1: Calls) -> Api:
    call = Call("GET", "/prompt")
    response = await ask(v1, call)
    with v1.reading(call.operation):
        if response.status_code != 200:
            raise unexpected("this is no Comfy Cloud", cut(response.text))
        what = "the length of the queue"
        mapping_in(mapping_in(json_of(call, response), what).get("exec_info"), what)
    return "v1"
