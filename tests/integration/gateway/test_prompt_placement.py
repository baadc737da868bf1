"""Prompts on workers whose backends differ: who runs what, and what is shown and refused."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.gateway import (
    PROMPT,
    GatewayInProcess,
    GatewayUser,
    gateway_on,
    worker_settings,
)
from tests.support.workers.workers import running_worker

from comfyfleet.engine import Served, serve_in_thread
from comfyfleet.engine.nodes import registry
from comfyfleet.server.gateway.model import job_id_of
from comfyfleet.server.gateway.policy import default_refusal
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.maintenance.embedded_fleet import embedded_fleet_secret

Value = TypeVar("Value")
INVERTED = {
    "1": PROMPT["1"],
    "3": {"class_type": "ImageInvert", "inputs": {"image": ["1", 0]}},
    "2": {"class_type": "SaveImage", "inputs": {"images": ["3", 0], "filename_prefix": "x"}},
}
BLURRED = {
    "1": PROMPT["1"],
    "3": {
        "class_type": "ImageBlur",
        "inputs": {"image": ["1", 0], "blur_radius": 1, "sigma": 1.0},
    },
    "2": {"class_type": "SaveImage", "inputs": {"images": ["3", 0], "filename_prefix": "x"}},
}


def engine_without(name: str, folder: Path) -> contextlib.AbstractContextManager[Served]:
    nodes = {each: node for each, node in registry().items() if each != name}
    return serve_in_thread(data=folder / f"without-{name}", nodes=nodes)


@contextlib.asynccontextmanager
async def two_kinds(databases: Databases, folder: Path) -> AsyncIterator[GatewayInProcess]:
    """One worker can't invert, the other can't blur."""
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(gateway_on(databases, folder, engines=0))
        secret = await embedded_fleet_secret(server.plane, folder)
        for name in ("ImageInvert", "ImageBlur"):
            engine = stack.enter_context(engine_without(name, folder))
            settings = worker_settings(server.url, secret, engine.url, folder, f"no-{name}")
            await stack.enter_async_context(running_worker(settings))
        user = await server.new_user()
        allowed = [
            name for name, node in registry().items() if not default_refusal(name, node.info)
        ]
        await asyncio.to_thread(server.wait_until_ready, user, len(allowed))
        yield server


@pytest.fixture
async def server(databases: Databases, tmp_path: Path) -> AsyncIterator[GatewayInProcess]:
    async with two_kinds(databases, tmp_path) as server:
        yield server


async def called(user: GatewayUser, work: Callable[[httpx.Client], Value]) -> Value:
    def call() -> Value:
        with user.http() as http:
            return work(http)

    return await asyncio.to_thread(call)


def run_all(user: GatewayUser, *prompts: Mapping[str, Any]) -> list[str]:
    with user.open_engine_client() as talk:
        ids = [talk.submit(each) for each in prompts]
        talk.wait_idle()
        return [str(talk.history(each)["status"]["status_str"]) for each in ids]


async def set_terms(server: GatewayInProcess, **terms: Any) -> None:
    headers = {"Authorization": f"Bearer {server.admin_key}"}
    path = f"{server.url}/api/admin/fleets/default/production/prompts"
    async with httpx.AsyncClient(headers=headers) as http:
        answer = await http.put(path, json=terms)
    assert answer.status_code == 200, answer.text


async def test_each_prompt_runs_on_the_worker_that_has_its_nodes(server: GatewayInProcess) -> None:
    user = await server.new_user()
    prompts = [INVERTED, BLURRED, PROMPT] * 3
    assert await asyncio.to_thread(run_all, user, *prompts) == ["success"] * 9


async def test_what_no_single_worker_can_run_is_refused_and_not_queued(
    server: GatewayInProcess,
) -> None:
    user = await server.new_user()
    both = {
        **INVERTED,
        "4": {**BLURRED["3"], "inputs": {**BLURRED["3"]["inputs"], "image": ["3", 0]}},
    }
    both["2"] = {"class_type": "SaveImage", "inputs": {"images": ["4", 0], "filename_prefix": "x"}}

    def work(http: httpx.Client) -> tuple[int, Any, Any]:
        refused = http.post("/prompt", json={"prompt": both})
        return refused.status_code, refused.json(), http.get("/queue").json()

    status, body, queue = await called(user, work)
    assert (status, body["error"]["type"]) == (400, "missing_node_type")
    assert queue == {"queue_running": [], "queue_pending": []}


async def test_object_info_is_the_union_and_is_not_sent_again_unchanged(
    server: GatewayInProcess,
) -> None:
    user = await server.new_user()

    def work(http: httpx.Client) -> None:
        first = http.get("/object_info")
        assert {"ImageInvert", "ImageBlur"} <= first.json().keys()
        assert "LoadLatent" not in first.json()
        assert first.headers["content-encoding"] == "gzip"
        etag = {"if-none-match": first.headers["etag"]}
        again = http.get("/object_info", headers=etag)
        assert (again.status_code, again.content) == (304, b"")
        plain = http.get("/object_info", headers={"accept-encoding": "identity"})
        assert plain.json() == first.json()
        file = {"image": ("mine.png", b"\x89PNG\r\n\x1a\n" + b"0" * 20, "image/png")}
        assert http.post("/upload/image", files=file).status_code == 200
        changed = http.get("/object_info", headers=etag)
        assert changed.status_code == 200
        one = http.get("/api/object_info/LoadImage").json()
        listed = json.dumps(one["LoadImage"]["input"]["required"]["image"])
        assert json.dumps(changed.json()["LoadImage"]) == json.dumps(one["LoadImage"])
        assert "mine.png" in listed
        assert http.get("/object_info/NoSuchNode").json() == {}

    await called(user, work)
    stranger = await server.new_user()
    told = await called(stranger, lambda http: http.get("/object_info").text)
    assert "mine.png" not in told


async def test_a_closed_fleet_takes_no_prompts_and_a_denied_node_is_named(
    server: GatewayInProcess,
) -> None:
    user = await server.new_user()

    def submit(http: httpx.Client) -> tuple[int, str]:
        answer = http.post("/prompt", json={"prompt": INVERTED})
        return answer.status_code, answer.json().get("error", {}).get("type", "")

    await set_terms(server, deny=["ImageInvert"])
    assert await called(user, submit) == (400, "node_type_not_allowed")
    await set_terms(server, is_open=False)
    assert await called(user, submit) == (400, "no_backend_available")


def with_preview(prompt: Mapping[str, Any]) -> dict[str, Any]:
    return {**prompt, "9": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}}}


async def prices(server: GatewayInProcess, *prompts: Mapping[str, Any]) -> list[int]:
    """Returns what the prompts of a new user cost, in their order; they need not run."""
    user = await server.new_user(tokens=1_000)

    def submit(http: httpx.Client) -> list[str]:
        answers = [http.post("/prompt", json={"prompt": prompt}) for prompt in prompts]
        assert [answer.status_code for answer in answers] == [200] * len(prompts)
        return [str(answer.json()["prompt_id"]) for answer in answers]

    ids = await called(user, submit)
    async with server.plane.context.tenant(user.tenant_id) as tx:
        job_ids = [job_id_of(user.tenant_id, user.user_id, each) for each in ids]
        found = await jobs.get_many(tx, user.tenant_id, job_ids)
    return [found[job_id].spec.price_tokens for job_id in job_ids]


async def register(
    server: GatewayInProcess, output_node_id: str | None = None, **prices_by_slug: tuple[Any, int]
) -> None:
    def prepare() -> None:
        for slug, (document, price) in prices_by_slug.items():
            asked = {"document": document, "price_tokens": price, "output_node_id": output_node_id}
            server.admin("/workflows", slug=slug, **asked)
        headers = {"Authorization": f"Bearer {server.admin_key}"}
        path = f"{server.url}/api/admin/fleets/default/production/workflows"
        answer = httpx.put(path, json={"workflow_slugs": list(prices_by_slug)}, headers=headers)
        assert answer.status_code == 200, answer.text

    await asyncio.to_thread(prepare)
    server.plane.context.caches.gateway.clear()  # kept for two seconds


async def test_a_prompt_costs_as_much_as_the_dearest_workflow_that_it_contains(
    server: GatewayInProcess,
) -> None:
    await register(server, invert=(INVERTED, 7), plain=(PROMPT, 3), blur=(BLURRED, 9))
    both = {**with_preview(INVERTED), "5": {**PROMPT["2"]}}
    assert await prices(server, INVERTED, with_preview(INVERTED), both) == [7, 7, 7]
    assert await prices(server, with_preview(BLURRED), with_preview(PROMPT)) == [9, 3]


async def test_a_workflow_costs_the_same_without_its_side_output(server: GatewayInProcess) -> None:
    await register(server, invert=(with_preview(INVERTED), 7))
    shown = {each: with_preview(INVERTED)[each] for each in ("1", "9")}
    assert await prices(server, shown, INVERTED) == [7, 7]
    await register(server, output_node_id="2", invert=(with_preview(INVERTED), 7))
    assert await prices(server, shown, INVERTED) == [0, 7]


async def test_an_output_counted_from_the_last_one_changes_no_price(
    server: GatewayInProcess,
) -> None:
    await register(server, invert=(INVERTED, 7))
    middle = {**INVERTED, "3": {"class_type": "ImageInvert", "inputs": {"image": ["1", -1]}}}
    end = {
        **INVERTED,
        "2": {**INVERTED["2"], "inputs": {"images": ["3", -1], "filename_prefix": "x"}},
    }
    assert await prices(server, middle, end, with_preview(middle)) == [7, 7, 7]


async def test_the_fleets_price_applies_if_it_is_the_higher_one(server: GatewayInProcess) -> None:
    await register(server, invert=(INVERTED, 7))
    await set_terms(server, price_tokens=12)
    server.plane.context.caches.gateway.clear()
    assert await prices(server, INVERTED, with_preview(INVERTED), PROMPT) == [12, 12, 12]


async def test_a_contained_workflow_opens_no_fleet(server: GatewayInProcess) -> None:
    await register(server, invert=(INVERTED, 7))
    await set_terms(server, is_open=False)
    server.plane.context.caches.gateway.clear()
    user = await server.new_user(tokens=100)

    def submit(http: httpx.Client) -> list[httpx.Response]:
        prompts = (INVERTED, with_preview(INVERTED))
        return [http.post("/prompt", json={"prompt": prompt}) for prompt in prompts]

    for answer in await called(user, submit):
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "no_backend_available"


async def test_an_operator_is_warned_of_a_price_below_that_of_a_workflow(
    server: GatewayInProcess, caplog: pytest.LogCaptureFixture
) -> None:
    await register(server, invert=(INVERTED, 7), plain=(PROMPT, 3))
    headers = {"Authorization": f"Bearer {server.admin_key}"}
    path = f"{server.url}/api/admin/fleets/default/production/prompts"
    async with httpx.AsyncClient(headers=headers) as http:
        low = (await http.put(path, json={"price_tokens": 6})).json()
        assert "less than the workflow invert (7 tokens)" in low["warning"]
        assert low["warning"] in caplog.text
        assert (await http.get(path)).json()["warning"] == low["warning"]
        by_second = (await http.put(path, json={"price_per_second": 0.5})).json()
        assert "0.5 tokens per second" in by_second["warning"]
        assert (await http.put(path, json={"price_tokens": 7})).json()["warning"] is None
        assert (await http.put(path, json={"is_open": False})).json()["warning"] is None


async def test_a_registered_workflow_is_recognised_by_its_shape(server: GatewayInProcess) -> None:
    user = await server.new_user(tokens=100)

    def prepare() -> None:
        server.admin("/workflows", slug="invert", document=INVERTED, price_tokens=7)
        headers = {"Authorization": f"Bearer {server.admin_key}"}
        path = f"{server.url}/api/admin/fleets/default/production/workflows"
        answer = httpx.put(path, json={"workflow_slugs": ["invert"]}, headers=headers)
        assert answer.status_code == 200, answer.text

    await asyncio.to_thread(prepare)
    renamed = {
        "a": {**INVERTED["1"], "inputs": {**INVERTED["1"]["inputs"], "width": 16}},
        "b": {"class_type": "ImageInvert", "inputs": {"image": ["a", 0]}},
        "c": {"class_type": "SaveImage", "inputs": {"images": ["b", 0], "filename_prefix": "y"}},
    }
    assert await asyncio.to_thread(run_all, user, renamed, PROMPT) == ["success"] * 2
    async with server.plane.context.tenant(user.tenant_id) as tx:
        ids = await jobs.ended_prompt_ids(tx, user.tenant_id, user.user_id, limit=10)
        found = await jobs.get_many(tx, user.tenant_id, ids)
    told = {each.spec.workflow_slug: each.spec.price_tokens for each in found.values()}
    assert told == {"invert": 7, "open-default.production": 0}
