"""Server-sent events end with the key that opened them, and are not without number."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import Customer, EffectSetup, effect_setup_on

from comfyfleet.server.http import streams
from comfyfleet.server.tenants import service as tenants

GRAPH = {
    "name": "Draw",
    "nodes": [
        {"id": "draw", "type": "workflow", "effect": "draw", "properties": {"width": 32}},
        {"id": "picture", "type": "output"},
    ],
    "connections": [{"from": "draw.output", "to": "picture.value"}],
}
PIPELINE = {"name": "Draw", "steps": [{"name": "draw", "effect": "draw", "properties": {"width": 32}}]}  # fmt: skip


@pytest.fixture
async def effect_setup(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EffectSetup]:
    monkeypatch.setattr(streams, "KEY_SECONDS", 0.05)
    async with (
        plane_on(databases, tmp_path, max_streams_per_key=1) as plane,
        effect_setup_on(plane) as effect_setup,
    ):
        yield effect_setup


async def made(ada: Customer, path: str, body: Mapping[str, object]) -> str:
    answer = await ada.client.post(f"/api/{path}", json=body)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


async def test_streams_of_all_kinds_are_counted_and_end_with_their_key(
    effect_setup: EffectSetup,
) -> None:
    ada = await effect_setup.customer()
    job_id = await ada.job(effect_setup.draw, properties={"width": 32})
    graph_id = await made(ada, "graphs", GRAPH)
    run_id = await made(ada, f"graphs/{graph_id}/runs", {})
    pipeline_id = await made(ada, "pipelines", PIPELINE)
    loop_id = await made(ada, f"pipelines/{pipeline_id}/runs", {"base_candidates": 1})
    for path in (f"ai-jobs/{job_id}", f"graph-runs/{run_id}", f"pipeline-runs/{loop_id}"):
        await _is_watched(effect_setup, ada, f"/api/{path}/events")


async def _is_watched(effect_setup: EffectSetup, ada: Customer, path: str) -> None:
    text, key = await effect_setup.key(ada.tenant_id, ada.user_id)
    headers = {"Authorization": f"Bearer {text}"}
    async with asyncio.timeout(60):
        both = [asyncio.create_task(ada.client.get(path, headers=headers)) for _ in range(2)]
        done, open_still = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        assert [each.result().status_code for each in done] == [429]
        async with effect_setup.plane.central.transaction() as tx:
            await tenants.revoke_key(
                tx, ada.tenant_id, ada.user_id, key.id, now=effect_setup.plane.clock()
            )
        (ended,) = await asyncio.gather(*open_still)
    assert ended.status_code == 200
    assert (await ada.client.get(path, headers=headers)).status_code == 401
