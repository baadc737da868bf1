"""Graph and pipeline runs in /metrics: how many go on, how they ended, and nobody's name."""

from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Table, func, insert, join, select, true
from tests.support.databases.query_plans import statements_of
from tests.support.server.control_plane import client_of
from tests.support.server.customers import Customer, EffectSetup, png

from comfyfleet.server.db import Database, Tx, metrics_queries
from comfyfleet.server.db.tenant_tables import ai_jobs, graph_runs
from comfyfleet.server.graphs.runner import read_outbox
from comfyfleet.server.http import health
from comfyfleet.server.maintenance.sweeps import advance_pipelines

GRAPH: dict[str, Any] = {
    "name": "secret-graph",
    "nodes": [
        {"id": "draw", "type": "workflow", "workflow": "draw"},
        {"id": "picture", "type": "output"},
    ],
    "connections": [{"from": "draw.output", "to": "picture.value"}],
}
PIPELINE = {"name": "secret-pipeline", "steps": [{"name": "Base", "workflow": "draw"}]}


async def read(
    effect_setup: EffectSetup, monkeypatch: Any
) -> tuple[dict[tuple[str, ...], float], str]:
    """(name, values of its labels, which are sorted by their names) → value."""
    monkeypatch.setattr(health, "FRESH_SECONDS", -1.0)
    async with client_of(effect_setup.plane, None) as client:
        answer = await client.get("/metrics")
    found = {
        (
            each.name.removeprefix("comfyfleet_"),
            *(value for _, value in sorted(each.labels.items())),
        ): each.value
        for family in text_string_to_metric_families(answer.text)
        for each in family.samples
    }
    return found, answer.text


async def made(ada: Customer, path: str, **body: Any) -> dict[str, Any]:
    answer = await ada.client.post(f"/api/{path}", json=body)
    assert answer.status_code < 300, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_runs_are_counted_by_state_and_outcome(
    effect_setup: EffectSetup, ada: Customer, monkeypatch: Any
) -> None:
    plane = effect_setup.plane
    graph = await made(ada, "graphs", **GRAPH)
    runs = [await made(ada, f"graphs/{graph['id']}/runs") for _ in range(4)]
    found, _ = await read(effect_setup, monkeypatch)
    assert found["graph_runs", "main", "running"] == 4
    assert found["graph_runs", "main", "waiting_for_user"] == 0
    assert found["run_jobs", "graph", "main", "queued"] == 4
    assert found["graph_runs_ended_total", "completed"] == 0
    await effect_setup.work(png())
    await effect_setup.fail()
    await read_outbox(plane.graphs, plane.pools["main"])
    statuses = [(await ada.get(f"graph-runs/{each['id']}"))["status"] for each in runs]
    left = [each["id"] for each, status in zip(runs, statuses, strict=True) if status == "running"]
    for run_id in left:
        for _ in range(2):  # the second time it is over already
            await ada.client.post(f"/api/graph-runs/{run_id}/cancel")
    found, text_ = await read(effect_setup, monkeypatch)
    ended = {name: found["graph_runs_ended_total", name] for name in ("completed", "failed")}
    assert ended == {"completed": 1, "failed": 1}
    assert found["graph_runs_ended_total", "cancelled"] == 2
    assert found["graph_runs", "main", "running"] == 0
    assert "secret" not in text_
    assert str(ada.tenant_id) not in text_


async def test_pipelines_are_counted_by_what_became_of_their_jobs(
    effect_setup: EffectSetup, ada: Customer, monkeypatch: Any
) -> None:
    plane, pool = effect_setup.plane, effect_setup.plane.pools["main"]
    pipeline = await made(ada, "pipelines", **PIPELINE)
    body = {"base_candidates": 4, "limits": {"concurrent_jobs": 4}}
    run = await made(ada, f"pipelines/{pipeline['id']}/runs", **body)
    await advance_pipelines(plane.context, pool)
    found, _ = await read(effect_setup, monkeypatch)
    assert found["pipeline_runs", "main", "active"] == 1
    assert found["run_jobs", "pipeline", "main", "queued"] == 4
    await effect_setup.work(png())
    await effect_setup.fail()
    async with effect_setup.fleet_setup.worker("busy") as worker:
        await worker.job()
        found, _ = await read(effect_setup, monkeypatch)
        assert found["run_jobs", "pipeline", "main", "queued"] == 1
    for _ in range(2):  # heard twice, counted once
        await advance_pipelines(plane.context, pool)
    await made(ada, f"pipeline-runs/{run['id']}/pause")
    found, _ = await read(effect_setup, monkeypatch)
    assert (found["pipeline_runs", "main", "active"], found["pipeline_runs", "main", "paused"]) == (
        0,
        1,
    )
    await made(ada, f"pipeline-runs/{run['id']}/cancel")
    found, text_ = await read(effect_setup, monkeypatch)
    counts = {name: found["pipeline_jobs_ended_total", name] for name in ("done", "failed")}
    assert counts == {"done": 1, "failed": 1}
    assert found["pipeline_jobs_ended_total", "cancelled"] == 1
    assert found["pipeline_alerts_total", "pipeline.alert"] == 0
    assert "secret" not in text_


async def test_an_index_answers_whoever_watches(effect_setup: EffectSetup, ada: Customer) -> None:
    """A look every few seconds must not read all that ever was: what it sends, with figures or not."""
    pool = effect_setup.plane.pools["main"]
    if not pool.is_sqlite:
        return
    graph = await made(ada, "graphs", **GRAPH)
    for _ in range(3):
        await made(ada, f"graphs/{graph['id']}/runs")
    await effect_setup.work(png())
    await read_outbox(effect_setup.plane.graphs, pool)
    async with pool.transaction() as tx:
        await copy_completed(tx, ai_jobs)
        await copy_completed(tx, graph_runs)
    await require_partial_indexes(pool)
    async with pool.transaction() as tx:
        await tx.exec_driver_sql("ANALYZE")
    await require_partial_indexes(pool)


async def copy_completed(tx: Tx, table: Table) -> None:
    """So many that it matters which way a query takes."""
    series = select(func.json_each("[" + "0," * 499 + "0]").table_valued("key")).subquery()
    new_id = func.lower(func.hex(func.randomblob(16)))
    row = [new_id if each.name == "id" else each for each in table.c]
    copies = (
        select(*row).select_from(join(table, series, true())).where(table.c.status == "completed")
    )
    await tx.execute(insert(table).from_select(list(table.c), copies))


async def require_partial_indexes(pool: Database) -> None:
    """Those that hold only what has not ended."""
    async with pool.read() as tx:
        for asked, index in (
            (metrics_queries.jobs_of_runs, "INDEX ai_jobs_active"),
            (metrics_queries.active_graph_runs, "INDEX graph_runs_going_on"),
        ):
            with statements_of(tx) as sent:
                assert sum((await asked(tx)).values()) == 2
            for statement, given in sent:
                plan = await tx.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", given)
                assert index in str(plan.all())
