"""What customers and workers make large is computed in pieces: the event loop turns meanwhile."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.graphs import GraphSetup, graph_setup_on
from tests.support.server.asgi import free_listener, served, url_of
from tests.support.server.loop_stalls import LoopStalls
from tests.support.server.outside import raw_request, send_from_outside

from comfyfleet.api.graphs import GraphRunAnswer
from comfyfleet.api.worker import object_info_hash
from comfyfleet.errors import FleetError, InvalidInput, LimitExceeded
from comfyfleet.server.fleets import object_info
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.object_info_parser import NODE_VALUES_MAX
from comfyfleet.server.graphs import actions, apply, reports
from comfyfleet.server.graphs.actions import NewGraphRun
from comfyfleet.server.graphs.apply import SLICE_MAX, CutRuns, GraphContext, LoadedRun
from comfyfleet.server.graphs.decide import decide_cancel, next_actions
from comfyfleet.server.graphs.run import GraphRunState, GraphRunStatus
from comfyfleet.server.graphs.runner import continue_cut_runs, sweep_runs
from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.public import views
from comfyfleet.server.pipelines.actions import create_pipeline
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.model import ALL_SCOPES, NewApiKey, new_api_key

ITEMS, ROUNDS = 60, 25
LIMIT = 2_000


def loops(rounds: int = ROUNDS) -> dict[str, Any]:
    """A graph without jobs: a loop of one value node, for each item of a list."""
    loop = {
        "id": "again",
        "type": "loop",
        "do": {
            "nodes": [{"id": "v", "type": "value", "values": {"x": "{{ round }}"}}],
            "result": "v.x",
        },
        "until": "output > 100000",
        "at_most": rounds,
    }
    each = {
        "id": "each",
        "type": "map",
        "over": "rows",
        "max_items": 10_000,
        "do": {"nodes": [loop], "result": "again.output"},
    }
    return {
        "name": "loops",
        "nodes": [{"id": "rows", "type": "input"}, each, {"id": "result", "type": "output"}],
        "connections": [{"from": "each.output", "to": "result.value"}],
    }


def values(nodes: int, templates: int) -> dict[str, Any]:
    """A graph of value nodes with many templates, each of which reads the one before it."""
    sources = ["a", *(f"n{number}.v0" for number in range(nodes - 1))]
    made = [
        {
            "id": f"n{number}",
            "type": "value",
            "values": {f"v{count}": f"{{{{ {source} }}}}" for count in range(templates)},
        }
        for number, source in enumerate(sources)
    ]
    ends = [{"id": "a", "type": "input", "default": 1}, {"id": "result", "type": "output"}]
    return {
        "name": "values",
        "nodes": [*made, *ends],
        "connections": [{"from": f"n{nodes - 1}.v0", "to": "result.value"}],
    }


@pytest.fixture
async def setup(databases: Databases, tmp_path: Path) -> AsyncIterator[GraphSetup]:
    async with graph_setup_on(
        databases, tmp_path, max_executions_per_graph_run=LIMIT * 4
    ) as graph_setup:
        yield graph_setup


async def ended(setup: GraphSetup, run: LoadedRun) -> LoadedRun:
    """Continues a run as the sweeps of a control plane do, until it has ended."""
    while True:
        while await continue_cut_runs(setup.graphs):  # noqa: ASYNC110 - nobody else runs it
            await asyncio.sleep(0)
        now = await setup.now(run)
        if now.run.status.is_over:
            return now
        assert now.run.is_cut
        await sweep_runs(setup.graphs, setup.plane.pools["main"])


async def test_a_graph_without_jobs_leaves_the_loop_turning(setup: GraphSetup) -> None:
    made = await actions.create_graph(setup.graphs, setup.owner, loops())
    async with LoopStalls("a run without jobs"):
        run = await setup.run(made.id, inputs={"rows": list(range(ITEMS))})
        was_cut = run.run.is_cut
        now = await ended(setup, run)
    assert was_cut
    assert now.run.status == GraphRunStatus.COMPLETED
    assert len(now.run.records) > ITEMS * ROUNDS
    assert now.head.outputs
    results = now.head.outputs["result"]["results"]
    assert [each["output"] for each in results] == [ROUNDS] * ITEMS
    # One revision for each slice, and none of them is large.
    assert now.revision > len(now.run.records) / SLICE_MAX


async def test_after_a_restart_a_run_continues_where_it_was(setup: GraphSetup) -> None:
    made = await actions.create_graph(setup.graphs, setup.owner, loops())
    run = await setup.run(made.id, inputs={"rows": list(range(ITEMS))})
    assert run.run.is_cut
    setup.plane.__dict__["graphs"] = GraphContext(setup.plane.context)
    stored = await setup.now(run)
    assert stored.run == run.run
    assert len(stored.run.records) > SLICE_MAX
    setup.graphs.runs.drop(run.head.id)
    with pytest.MonkeyPatch.context() as patch:
        # Nobody else has changed it for long.
        now = setup.plane.context.clock
        patch.setattr("comfyfleet.server.graphs.runner.CONTINUED_ELSEWHERE", now() - now())
        async with LoopStalls("a run after a restart"):
            await sweep_runs(setup.graphs, setup.plane.pools["main"])
            again = await ended(setup, run)
    assert again.run.status == GraphRunStatus.COMPLETED


async def test_a_run_that_another_process_continues_is_left_to_it(setup: GraphSetup) -> None:
    made = await actions.create_graph(setup.graphs, setup.owner, loops())
    run = await setup.run(made.id, inputs={"rows": list(range(ITEMS))})
    setup.plane.__dict__["graphs"] = GraphContext(setup.plane.context)
    await sweep_runs(setup.graphs, setup.plane.pools["main"])
    assert (await setup.now(run)).revision == run.revision


async def test_a_large_run_is_cancelled_while_the_loop_turns(setup: GraphSetup) -> None:
    made = await actions.create_graph(setup.graphs, setup.owner, loops())
    run = await setup.run(made.id, inputs={"rows": list(range(ITEMS * 4))})
    async with LoopStalls("a cancellation"):
        now = await actions.cancel_graph_run(setup.graphs, setup.owner, run.head.id)
    assert now.run.status == GraphRunStatus.CANCELLED
    assert not now.run.is_cut


async def test_a_large_run_is_read_while_the_loop_turns(setup: GraphSetup) -> None:
    made = await actions.create_graph(setup.graphs, setup.owner, loops())
    run = await ended(setup, await setup.run(made.id, inputs={"rows": list(range(ITEMS * 2))}))
    setup.plane.__dict__["graphs"] = GraphContext(setup.plane.context)
    async with LoopStalls("views of a large run"):
        answers = [await shown(setup, run, limit) for limit in (200, 20_000)]
        timeline = await reports.read_timeline(setup.graphs, setup.owner, run.head.id)
        await reports.compare_own_runs(
            setup.graphs, setup.owner, run.head.id, run.head.id, with_same=True
        )
    assert [len(each.executions) for each in answers] == [200, answers[1].executions_total]
    assert timeline.nodes


async def test_work_on_large_runs_is_done_in_threads(
    setup: GraphSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs of other tests are too small to be noticed in the loop; the largest allowed take long to make."""
    in_loop, in_threads = list[int](), list[int]()

    def noted(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(first: Any, state: GraphRunState, *arguments: Any, **options: Any) -> Any:
            is_in_loop = threading.current_thread() is threading.main_thread()
            (in_loop if is_in_loop else in_threads).append(len(state.records))
            return work(first, state, *arguments, **options)

        return run

    monkeypatch.setattr(apply, "next_actions", noted(next_actions))
    monkeypatch.setattr(actions, "decide_cancel", noted(decide_cancel))
    made = await actions.create_graph(setup.graphs, setup.owner, loops())
    run = await ended(setup, await setup.run(made.id, inputs={"rows": list(range(ITEMS))}))
    other = await setup.run(made.id, inputs={"rows": list(range(ITEMS))})
    await actions.cancel_graph_run(setup.graphs, setup.owner, other.head.id)
    assert max(in_loop) <= apply.IN_LOOP_EXECUTIONS_MAX
    assert max(in_threads) > ITEMS * ROUNDS - SLICE_MAX
    in_loop.clear()
    in_threads.clear()
    monkeypatch.setattr(views, "_run_answer", noted(views._run_answer))
    await shown(setup, run, 20_000)
    assert (in_loop, in_threads) == ([], [len(run.run.records)])


async def shown(setup: GraphSetup, run: LoadedRun, limit: int) -> GraphRunAnswer:
    loaded, live = await actions.get_live_run(setup.graphs, setup.owner, run.head.id)
    async with setup.plane.central.read() as tx:
        tenant = await tenants.get_tenant(tx, setup.owner.tenant_id)
    return await views.run_view(setup.plane, tenant, loaded, live, limit=limit)


async def test_a_large_run_is_sent_while_the_loop_turns(setup: GraphSetup) -> None:
    """As other programs read it: with the work that frameworks do for an answer."""
    made = await actions.create_graph(setup.graphs, setup.owner, loops())
    run = await ended(setup, await setup.run(made.id, inputs={"rows": list(range(ITEMS * 2))}))
    key = await new_key(setup)
    path = f"/api/graph-runs/{run.head.id}"
    requests = [
        raw_request("GET", each, key=key)
        for each in (path, f"{path}?executions=20000", f"{path}/timeline", "/api/graph-runs")
    ]
    listener = free_listener()
    async with served(create_app(setup.plane), listener), LoopStalls("a large run over HTTP"):
        answers = await send_from_outside(url_of(listener), requests)
    assert [each.status for each in answers] == [200] * len(requests)
    assert len(json.loads(answers[1].body)["executions"]) > ITEMS * ROUNDS


async def new_key(setup: GraphSetup) -> str:
    tenant_id, user_id = setup.owner.tenant_id, setup.owner.user_id
    now, text = setup.plane.clock(), new_api_key()
    pool = await setup.plane.context.pool_of(tenant_id)
    async with pool.transaction() as tx:
        await tenants.create_user(tx, user_id=user_id, tenant_id=tenant_id, now=now)
    new = NewApiKey(uuid4(), text, tenant_id, user_id, "test", ALL_SCOPES, None)
    async with setup.plane.central.transaction() as tx:
        await tenants.create_key(tx, new, now=now)
    return text


async def test_tenants_take_turns_with_large_decisions() -> None:
    """A tenant with many large runs doesn't keep the only one of another waiting."""
    cut, one, other = CutRuns(), uuid4(), uuid4()
    many = [uuid4() for _ in range(3)]
    for run_id in many:
        cut.add(one, run_id)
    single = uuid4()
    cut.add(other, single)
    assert cut.take_one_per_tenant() == [(one, many[0]), (other, single)]
    cut.add(one, many[0])
    assert cut.take_one_per_tenant() == [(one, many[1])]
    assert many[1] not in cut
    assert many[0] in cut


# Limits


def items(count: int) -> dict[str, Any]:
    """A graph with exactly `count` executions: an input, a map with its end, an output, and items."""
    each = {
        "id": "each",
        "type": "map",
        "over": "rows",
        "max_items": 10_000,
        "do": {"nodes": [{"id": "v", "type": "value", "values": {"x": 1}}], "result": "v.x"},
    }
    rows = {"id": "rows", "type": "input", "default": list(range(count))}
    return {
        "name": "items",
        "nodes": [rows, each, {"id": "result", "type": "output"}],
        "connections": [{"from": "each.output", "to": "result.value"}],
    }


async def test_a_run_may_have_as_many_executions_as_its_limit_and_no_more(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path, max_executions_per_graph_run=LIMIT) as setup:
        made = await actions.create_graph(setup.graphs, setup.owner, items(10))
        quote = await actions.quote_run(setup.graphs, setup.owner, made.id, {})
        fixed = quote.executions_max - 10
        most = NewGraphRun({"rows": list(range(LIMIT - fixed))})
        async with LoopStalls("a run at its limit"):
            run, _ = await actions.start_run(setup.graphs, setup.owner, made.id, most)
            now = await ended(setup, run)
        assert now.run.status == GraphRunStatus.COMPLETED
        assert len(now.run.records) == LIMIT
        more = NewGraphRun({"rows": list(range(LIMIT - fixed + 1))})
        with pytest.raises(LimitExceeded, match=r"2,001 executions, more than its limit of 2,000"):
            await actions.start_run(setup.graphs, setup.owner, made.id, more)
        with pytest.raises(LimitExceeded, match="limit of 2,000"):
            await actions.create_graph(setup.graphs, setup.owner, items(LIMIT))


async def test_a_run_whose_executions_are_not_known_before_fails_at_its_limit(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path, max_executions_per_graph_run=LIMIT) as setup:
        made = await actions.create_graph(setup.graphs, setup.owner, loops(50))
        run = await setup.run(made.id, inputs={"rows": list(range(ITEMS))})
        now = await ended(setup, run)
    assert now.run.status == GraphRunStatus.FAILED
    assert now.run.error
    assert "more than its limit of 2,000" in now.run.error.message


async def test_many_templates_are_checked_while_the_loop_turns(setup: GraphSetup) -> None:
    document = values(450, 20)
    async with LoopStalls("many templates"):
        checked = await actions.check_document(setup.graphs, setup.owner, document)
        assert not checked.check.problems
        await actions.quote_checked(setup.graphs, setup.owner, checked, {})
        made = await actions.create_graph(setup.graphs, setup.owner, document)
        await actions.add_graph_version(setup.graphs, setup.owner, made.id, document)
        await actions.graph_ports(setup.graphs, setup.owner, made.id)
        run = await setup.run(made.id)
        await ended(setup, run)


async def test_more_characters_of_templates_than_allowed_are_refused_while_the_loop_turns(
    setup: GraphSetup,
) -> None:
    document = values(450, 20)
    document["nodes"][0]["values"]["v0"] = "{{ a }}" * 30_000
    async with LoopStalls("too many characters of templates"):
        with pytest.raises(FleetError, match="200,000 characters"):
            await actions.create_graph(setup.graphs, setup.owner, document)


async def test_pipelines_with_many_templates_are_stored_while_the_loop_turns(
    setup: GraphSetup,
) -> None:
    steps = [
        {
            "name": f"s{step}",
            "workflow": "draw",
            "properties": {f"p{number}": "{{ 1 + 2 }}" for number in range(360)},
        }
        for step in range(50)
    ]
    whose = (setup.owner.tenant_id, setup.owner.user_id)
    async with LoopStalls("a pipeline with many templates"):
        with pytest.raises(InvalidInput, match="p0"):  # the workflow has no such property
            await create_pipeline(
                setup.plane.context, *whose, {"name": "templates", "steps": steps}
            )


# object_infos


def node_types(values_each: int, count: int) -> bytes:
    entry = b'{"input":{"required":{"a":[' + b",".join([b"[]"] * (values_each // 2 - 2)) + b"]}}}"
    return b"{" + b",".join(b'"N%d":%b' % (number, entry) for number in range(count)) + b"}"


async def uploaded(setup: GraphSetup, data: bytes) -> str:
    """Uploads an object_info as a worker does; returns its hash."""
    content_hash = object_info_hash(json.loads(data))
    plane = setup.plane
    async with plane.central.read() as tx:
        fleet = (await fleets.list_fleets(tx))[0]
    await plane.store.put(object_info.incoming_key(fleet, content_hash), data, "application/json")
    return content_hash


async def test_a_large_object_info_is_parsed_while_the_loop_turns(setup: GraphSetup) -> None:
    data = node_types(NODE_VALUES_MAX - 10, 1)
    content_hash = await uploaded(setup, data)
    async with setup.plane.central.read() as tx:
        fleet = (await fleets.list_fleets(tx))[0]
    cache = object_info.ObjectInfoCache()
    async with LoopStalls("a large object_info"):
        found = await cache.get(setup.plane.store, fleet, content_hash)
    assert found == json.loads(data)


async def test_an_object_info_with_more_values_is_refused_while_the_loop_turns(
    setup: GraphSetup,
) -> None:
    content_hash = await uploaded(setup, node_types(NODE_VALUES_MAX - 10, 30))
    async with setup.plane.central.read() as tx:
        fleet = (await fleets.list_fleets(tx))[0]
    async with LoopStalls("too large an object_info"):
        with pytest.raises(InvalidInput, match="1,000,000 values"):
            await object_info.accept_upload(setup.plane.store, fleet, content_hash)
    assert await setup.plane.store.head(object_info.incoming_key(fleet, content_hash)) is None
