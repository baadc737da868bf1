"""The walls between tenants, between users, and between the faces of the API.

Every route of the API's document is tried, so that a new one stands behind the same walls or fails here.
"""

import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import httpx
import pytest
from sqlalchemy import update
from tests.support.server.control_plane import ADMIN_KEY, client_of, documented_routes
from tests.support.server.customers import TOKENS, Customer, EffectSetup, png

from comfyfleet.clock import utc_now
from comfyfleet.server.db.central_tables import api_keys
from comfyfleet.server.maintenance.sweeps import advance_pipelines
from comfyfleet.server.tenants import service

FACES = ("/api/admin/", "/api/worker/")
# Whoever signs in has no key yet; tests/security/test_sessions.py tries it. A link has a secret in place of one. The
# catalogue is for visitors, where that is set.
EVERYBODYS_ROUTES = ("/api/catalogue", "/api/session", "/api/shared/")
# A graph is its tenant's, not one user's: whoever works there may run it; who made it may change it.
TENANTS = ("/api/graphs",)
NOBODYS = str(UUID(int=1))
# What all customers see: there is nothing of anybody's behind it.
EVERYBODYS = {"effect_id"}
# These answer a question that needs a body, and change nothing.
QUESTIONS = ("/validate", "/quote")
GRAPH: dict[str, Any] = {
    "name": "one",
    "nodes": [
        {"id": "draw", "type": "workflow", "workflow": "draw"},
        {"id": "picture", "type": "output"},
    ],
    "connections": [{"from": "draw.output", "to": "picture.value"}],
}
PIPELINE = {"name": "One step", "steps": [{"name": "Base", "workflow": "draw"}]}
# What a route asks for before it looks whose the thing is.
BODIES: dict[str, dict[str, Any]] = {
    "/api/graphs": GRAPH,
    "/api/graphs/validate": GRAPH,
    "/api/graphs/{graph_id}/versions": GRAPH,
    "/api/graphs/{graph_id}/quote": {},
    "/api/graphs/{graph_id}/runs": {},
    "/api/graph-runs": {"document": GRAPH},
    "/api/graph-runs/{run_id}/answer": {"node": "draw", "choice": "skip"},
    "/api/videos/{video_id}/shares": {},
    "/api/ai-jobs/{job_id}/shares": {},
    "/api/triggers/{trigger_id}/fire": {},
    "/api/pipelines": PIPELINE,
    "/api/pipelines/{pipeline_id}/runs": {"base_candidates": 1},
    "/api/pipeline-runs/{run_id}": {"base_candidates": 9},
    "/api/pipeline-runs/{run_id}/vote": {"winner": NOBODYS, "loser": str(UUID(int=2))},
}
# Ids that a route takes beside its path.
QUERIES = {"/api/graph-runs/compare": "?a={run_id}&b={run_id}"}


@dataclass(frozen=True)
class Route:
    method: str
    path: str

    @property
    def address(self) -> str:
        return self.path + QUERIES.get(self.path, "")

    @property
    def names(self) -> list[str]:
        return re.findall(r"{(\w+)}", self.address)

    @property
    def is_tenants(self) -> bool:
        return self.path.partition("/{")[0] in TENANTS

    @property
    def is_question(self) -> bool:
        return self.path.endswith(QUESTIONS)

    def filled(self, ids: dict[str, str]) -> str:
        """A run's id is that of a graph's or of a pipeline's, as the path says."""
        kind = "graph_run_id" if "/graph-runs" in self.path else "pipeline_run_id"
        return self.address.format(**{**ids, "run_id": ids.get(kind, NOBODYS)})

    async def asked_by(self, client: httpx.AsyncClient, ids: dict[str, str]) -> httpx.Response:
        body = None if self.method == "GET" else BODIES.get(self.path)
        return await client.request(self.method, self.filled(ids), json=body)


def routes_of(effect_setup: EffectSetup) -> Iterator[Route]:
    for path, methods in documented_routes(effect_setup.plane).items():
        for method in methods:
            if path.startswith("/api/"):
                yield Route(method.upper(), path)


def customers_routes(effect_setup: EffectSetup) -> list[Route]:
    return [
        each
        for each in routes_of(effect_setup)
        if not each.path.startswith((*FACES, *EVERYBODYS_ROUTES))
    ]


@dataclass
class Estate:
    """All that a customer can own, one of each."""

    owner: Customer
    ids: dict[str, str]
    file_id: str
    delivery_id: str

    async def seen(self) -> list[Any]:
        """What nobody else may change."""
        job = await self.owner.get(f"ai-jobs/{self.ids['job_id']}")
        batch = await self.owner.get(f"ai-jobs/batches/{self.ids['batch_id']}")
        keys_ = (await self.owner.get("keys"))["keys"]
        graph = await self.owner.get(f"graphs/{self.ids['graph_id']}")
        graph_run = await self.owner.get(f"graph-runs/{self.ids['graph_run_id']}")
        run = f"pipeline-runs/{self.ids['pipeline_run_id']}"
        pipeline_run = await self.owner.get(run)
        candidates = (await self.owner.get(f"{run}/candidates"))["candidates"]
        return [
            (job["status"], batch["counts"], await self.owner.balance()),
            [(each["id"], each["revoked_at"]) for each in keys_],
            (await self.owner.get("webhooks"))["webhooks"],
            (await self.owner.get("shares"))["shares"],
            (await self.owner.get("triggers"))["triggers"],
            [each["id"] for each in (await self.owner.get("ai-jobs"))["jobs"]],
            (graph["version"], graph_run["status"], graph_run["tokens"]),
            {**pipeline_run, "changed_at": None},
            [(each["id"], each["status"], each["score"]) for each in candidates],
        ]


async def made(customer: Customer, path: str, **body: Any) -> dict[str, Any]:
    answer = await customer.client.post(f"/api/{path}", json=body)
    assert answer.status_code < 300, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def runs_of(effect_setup: EffectSetup, ada: Customer) -> dict[str, str]:
    """A graph whose run goes on, and a pipeline's run with two candidates that were compared."""
    pipeline = await made(ada, "pipelines", **PIPELINE)
    limits = {"concurrent_jobs": 2}
    path = f"pipelines/{pipeline['id']}/runs"
    run = await made(ada, path, base_candidates=2, limits=limits)
    pool = await effect_setup.plane.context.pool_of(ada.tenant_id)
    await advance_pipelines(effect_setup.plane.context, pool)
    for colour in (1, 2):
        await effect_setup.work(png(colour=colour))
    await advance_pipelines(effect_setup.plane.context, pool)
    found = (await ada.get(f"pipeline-runs/{run['id']}/candidates"))["candidates"]
    one, two = (each["id"] for each in found)
    vote = await made(ada, f"pipeline-runs/{run['id']}/vote", winner=one, loser=two)
    graph = await made(ada, "graphs", **GRAPH)
    going = await made(ada, f"graphs/{graph['id']}/runs")
    trigger = await made(ada, "triggers", name="t", graph=graph["id"], tokens_per_day=9)
    return {
        "trigger_id": trigger["id"],
        "pipeline_id": pipeline["id"],
        "pipeline_run_id": run["id"],
        "candidate_id": one,
        "vote_id": vote["id"],
        "graph_id": graph["id"],
        "graph_run_id": going["id"],
    }


@pytest.fixture
async def estate(effect_setup: EffectSetup, ada: Customer) -> Estate:
    shared = await ada.job(effect_setup.draw)
    await effect_setup.work(png())
    share = await made(ada, f"ai-jobs/{shared}/shares")
    runs = await runs_of(effect_setup, ada)
    hook = await ada.client.post("/api/webhooks", json={"url": "https://shop.example/hook"})
    hook_id = hook.json()["id"]
    await ada.client.delete(f"/api/ai-jobs/{await ada.job(effect_setup.draw)}")
    (delivery,) = (await ada.get(f"webhooks/{hook_id}/deliveries"))["deliveries"]
    video_id = await ada.video()
    batch = await ada.client.post(
        "/api/ai-jobs/batches", json={"effect_id": str(effect_setup.draw.id), "items": [{}]}
    )
    key = await ada.client.post("/api/keys", json={"name": "second"})
    ids = {
        **runs,
        "video_id": video_id,
        "job_id": await ada.job(effect_setup.invert, video_id=video_id),
        "batch_id": batch.json()["id"],
        "webhook_id": hook_id,
        "key_id": key.json()["id"],
        "effect_id": str(effect_setup.draw.id),
        "share_id": share["id"],
        "delivery_id": delivery["id"],
        "file_id": await ada.upload(png(colour=8)),
    }
    return Estate(ada, ids, await ada.upload(png(colour=9)), delivery["id"])


async def test_every_id_is_its_owners_alone(effect_setup: EffectSetup, estate: Estate) -> None:
    before = await estate.seen()
    stranger, colleague = (
        await effect_setup.customer(),
        await effect_setup.customer(estate.owner.tenant_id),
    )
    with_ids = [
        each
        for each in customers_routes(effect_setup)
        if each.names and set(each.names) - EVERYBODYS
    ]
    assert len(with_ids) >= 40
    for route in with_ids:
        known = {*estate.ids, "run_id"}
        assert set(route.names) <= known, f"{route}: own one of these in the test"
        for other in (stranger,) if route.is_tenants else (stranger, colleague):
            answer = await route.asked_by(other.client, estate.ids)
            assert answer.status_code == 404, (route, answer.text)
            assert answer.json()["error"]["code"] == "not_found"
    assert await estate.seen() == before


async def test_a_graph_is_its_tenants_and_each_run_its_users(
    effect_setup: EffectSetup, estate: Estate
) -> None:
    colleague = await effect_setup.customer(estate.owner.tenant_id)
    tenants = [each for each in customers_routes(effect_setup) if each.names and each.is_tenants]
    assert len(tenants) == 7
    for route in tenants:
        answer = await route.asked_by(colleague.client, estate.ids)
        is_change = route.method == "DELETE" or route.path.endswith("/versions")
        wanted = (403,) if is_change else (200, 201)
        assert answer.status_code in wanted, (route, answer.text)
    run = await made(colleague, f"graphs/{estate.ids['graph_id']}/runs")
    theirs = await estate.owner.client.get(f"/api/graph-runs/{run['id']}")
    assert theirs.status_code == 404


async def test_ids_in_bodies_and_cursors_are_their_owners_alone(
    effect_setup: EffectSetup, estate: Estate
) -> None:
    ids, effect_id = estate.ids, str(effect_setup.invert.id)
    before = await estate.seen()
    styled = await shop_with_two_pictures(effect_setup)
    for other in (
        await effect_setup.customer(),
        await effect_setup.customer(estate.owner.tenant_id),
    ):
        own = await other.video(png(colour=3))
        calls: list[tuple[str, dict[str, Any]]] = [
            ("/api/videos", {"file_id": estate.file_id}),
            ("/api/ai-jobs", {"effect_id": effect_id, "video_id": ids["video_id"]}),
            (
                "/api/ai-jobs/batches",
                {"effect_id": effect_id, "items": [{"video_id": ids["video_id"]}]},
            ),
            (
                "/api/ai-jobs",
                {
                    "effect_id": styled,
                    "video_id": own,
                    "properties": {"style": ids["video_id"]},
                },
            ),
        ]
        for path, body in calls:
            answer = await other.client.post(path, json=body)
            assert answer.status_code == 404, (path, body, answer.text)
        for path, cursor in (
            ("/api/videos", ids["video_id"]),
            ("/api/shares", ids["share_id"]),
            ("/api/triggers", ids["trigger_id"]),
            ("/api/ai-jobs", ids["job_id"]),
            ("/api/pipelines", ids["pipeline_id"]),
            ("/api/pipeline-runs", ids["pipeline_run_id"]),
            ("/api/graph-runs", ids["graph_run_id"]),
        ):
            answer = await other.client.get(path, params={"before": cursor})
            assert answer.status_code == 404, (path, answer.text)
        ours = {"effect_id": styled, "video_id": own, "properties": {"style": own}}
        assert (await other.client.post("/api/ai-jobs", json=ours)).status_code == 201
        listed = (await other.get("videos"))["videos"]
        assert [each["id"] for each in listed] == [own]
    assert await estate.seen() == before


async def test_candidates_and_votes_are_of_one_run_alone(
    effect_setup: EffectSetup, estate: Estate
) -> None:
    """A run of one's own opens no candidate of another's."""
    before = await estate.seen()
    other = await effect_setup.customer(estate.owner.tenant_id)
    pipeline = await made(other, "pipelines", **PIPELINE)
    own = await made(other, f"pipelines/{pipeline['id']}/runs", base_candidates=1)
    mixed = {**estate.ids, "pipeline_run_id": own["id"]}
    inner = [
        each
        for each in customers_routes(effect_setup)
        if {"candidate_id", "vote_id"} & {*each.names}
    ]
    assert len(inner) >= 6
    for route in inner:
        answer = await route.asked_by(other.client, mixed)
        assert answer.status_code == 404, (route, answer.text)
    seen = (await estate.owner.get(f"pipeline-runs/{estate.ids['pipeline_run_id']}/candidates"))[
        "candidates"
    ]
    body = {"winner": seen[0]["id"], "loser": seen[1]["id"]}
    answer = await other.client.post(f"/api/pipeline-runs/{own['id']}/vote", json=body)
    assert answer.status_code == 404, answer.text
    theirs = {"parent": estate.ids["candidate_id"]}
    listed = await other.get(f"pipeline-runs/{own['id']}/candidates", **theirs)
    assert listed["candidates"] == []
    filtered = await other.get("pipeline-runs", pipeline_id=estate.ids["pipeline_id"])
    assert filtered["runs"] == []
    assert await estate.seen() == before


GIVEN: dict[str, Any] = {
    "name": "given",
    "nodes": [
        {"id": "photo", "type": "input", "value_type": "image"},
        {"id": "invert", "type": "workflow", "workflow": "invert"},
        {"id": "picture", "type": "output"},
    ],
    "connections": [
        {"from": "photo.value", "to": "invert.input"},
        {"from": "invert.output", "to": "picture.value"},
    ],
}


async def test_a_run_takes_no_file_of_others_as_an_input(
    effect_setup: EffectSetup, estate: Estate
) -> None:
    for other in (
        await effect_setup.customer(),
        await effect_setup.customer(estate.owner.tenant_id),
    ):
        graph = await made(other, "graphs", **GIVEN)
        for named in (estate.file_id, estate.ids["video_id"]):
            body = {"inputs": {"photo": named}}
            answer = await other.client.post(f"/api/graphs/{graph['id']}/runs", json=body)
            assert answer.status_code == 422, answer.text
            (problem,) = answer.json()["error"]["details"]["problems"]
            assert (problem["code"], problem["node"]) == ("unknown_file", "photo")


async def test_nor_one_that_is_written_into_a_graph_or_a_pipeline(
    effect_setup: EffectSetup, estate: Estate
) -> None:
    draw, picture = GRAPH["nodes"]
    bound = {**draw, "workflow": "invert", "properties": {"input": estate.file_id}}
    steps = [{"name": "Base", "workflow": "invert", "properties": {"input": estate.file_id}}]
    for other in (
        await effect_setup.customer(),
        await effect_setup.customer(estate.owner.tenant_id),
    ):
        graph = await made(other, "graphs", **{**GRAPH, "nodes": [bound, picture]})
        run = await made(other, f"graphs/{graph['id']}/runs")
        assert run["status"] == "failed"
        assert "was not found" in run["error"]["message"]
        pipeline = await made(other, "pipelines", name="x", steps=steps)
        path = f"pipelines/{pipeline['id']}/runs"
        pipeline_setup = (await made(other, path, base_candidates=1))["id"]
        for _, pool in effect_setup.plane.pools.items():
            await advance_pipelines(effect_setup.plane.context, pool)
        seen = await other.get(f"pipeline-runs/{pipeline_setup}")
        assert "was not found" in seen["trouble"]
        assert await other.balance() == TOKENS


async def test_the_same_content_of_two_users_is_each_ones_own(
    effect_setup: EffectSetup, estate: Estate
) -> None:
    other = await effect_setup.customer(estate.owner.tenant_id)
    mine = await estate.owner.video(png(colour=77))
    theirs = await other.video(png(colour=77))
    assert mine != theirs
    graph = await made(other, "graphs", **GIVEN)
    run = await made(other, f"graphs/{graph['id']}/runs", inputs={"photo": theirs})
    assert run["status"] == "running"
    body = {"inputs": {"photo": mine}}
    answer = await other.client.post(f"/api/graphs/{graph['id']}/runs", json=body)
    assert answer.status_code == 422, answer.text


async def shop_with_two_pictures(effect_setup: EffectSetup) -> str:
    """An effect that takes a second picture, as a property."""
    document = {
        "1": {"class_type": "LoadImage", "inputs": {"image": "a.png"}},
        "2": {"class_type": "LoadImage", "inputs": {"image": "b.png"}},
        "3": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
    }
    properties = [
        {"name": "input", "type": "image", "binding": "1.image"},
        {"name": "style", "type": "image", "binding": "2.image"},
    ]
    made = await effect_setup.fleet_setup.register_workflow(
        "styled", document=document, properties=properties
    )
    assert made.status_code == 201, made.text
    return str((await effect_setup.publish("styled")).id)


async def test_only_a_good_key_of_a_customer_opens_a_customers_route(
    effect_setup: EffectSetup, estate: Estate
) -> None:
    owner = estate.owner
    later = utc_now() + timedelta(hours=1)
    expired, old = await effect_setup.key(owner.tenant_id, owner.user_id, expires_at=later)
    async with effect_setup.plane.central.transaction() as tx:
        of_old = update(api_keys).where(api_keys.c.id == old.id)
        await tx.execute(of_old.values(expires_at=utc_now()))
    revoked, key = await effect_setup.key(owner.tenant_id, owner.user_id)
    async with effect_setup.plane.central.transaction() as tx:
        await service.revoke_key(tx, owner.tenant_id, owner.user_id, key.id, now=utc_now())
    of_worker = (await effect_setup.fleet_setup.register("w1")).json()["token"]
    before = await estate.seen()
    wanted = [(None, 401), ("cf_nonsense", 401), (expired, 401), (revoked, 401)]
    wanted += [(ADMIN_KEY, 403), (of_worker, 403)]
    async with AsyncExitStack() as stack:
        for text, status in wanted:
            client = await stack.enter_async_context(client_of(effect_setup.plane, text))
            for route in customers_routes(effect_setup):
                answer = await route.asked_by(client, estate.ids)
                assert answer.status_code == status, (route, text, answer.text)
    assert await estate.seen() == before


async def test_a_customers_key_opens_nothing_of_operators_or_workers(
    effect_setup: EffectSetup, estate: Estate
) -> None:
    for route in routes_of(effect_setup):
        if not route.path.startswith(FACES) or route.path.endswith("/register"):
            continue
        ids = dict.fromkeys(route.names, "1")
        bodies: tuple[dict[str, Any] | None, ...] = (None, {})
        for body in bodies:
            answer = await estate.owner.client.request(route.method, route.filled(ids), json=body)
            assert answer.status_code in (401, 403), (route, answer.text)


# 404 for everybody but the user who started `up`.
OF_THE_LOCAL_USER = "/api/local/"
GIVES_URLS_TO_WRITE = ("/api/videos/uploads/{file_id}",)


async def test_a_key_without_the_scope_is_told_so(
    effect_setup: EffectSetup, estate: Estate
) -> None:
    owner = estate.owner
    text, _ = await effect_setup.key(owner.tenant_id, owner.user_id, scopes=["read"])
    async with client_of(effect_setup.plane, text) as reader:
        for route in customers_routes(effect_setup):
            if route.path.endswith(("/keys", "/events")) and route.method == "GET":
                continue
            if route.path.startswith(OF_THE_LOCAL_USER) and route.method == "GET":
                continue
            answer = await route.asked_by(reader, estate.ids)
            is_reading = route.method == "GET" and route.path not in GIVES_URLS_TO_WRITE
            if is_reading or route.is_question:
                assert answer.status_code == 200, (route, answer.text)
            else:
                assert answer.status_code == 403, (route, answer.text)


async def test_what_is_one_tenants_reaches_no_other_in_answers(
    effect_setup: EffectSetup, estate: Estate
) -> None:
    """Whatever a stranger can list, nothing of the estate is in it."""
    stranger = await effect_setup.customer()
    private = {each for name, each in estate.ids.items() if name not in EVERYBODYS}
    private |= {estate.file_id, estate.delivery_id, str(estate.owner.user_id)}
    for route in customers_routes(effect_setup):
        # A stream of events has no end; what it tells is compared in test_public_progress.py.
        if route.method == "GET" and not route.names and not route.path.endswith("/events"):
            answer: httpx.Response = await stranger.client.get(route.path)
            assert answer.status_code == 200
            assert not [each for each in private if each in answer.text], route
