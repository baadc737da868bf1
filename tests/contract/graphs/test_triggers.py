"""Triggers on either database: each moment and delivery starts one run, within the tokens of its day."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import func, select, update
from tests.contract.graphs.test_graph_runs import FAN_OUT
from tests.support.databases.factory import Databases
from tests.support.jobs.context import ManualClock
from tests.support.jobs.fuse import Fuse, ProcessDied, fused
from tests.support.jobs.graphs import (
    PRICE,
    GraphSetup,
    graph,
    graph_setup_on,
    new_owner,
    node,
    output,
)

from comfyfleet.api.graphs import FiringCause, FiringStatus
from comfyfleet.api.webhooks import Signature
from comfyfleet.errors import InvalidInput, LimitExceeded, NotFound
from comfyfleet.server import triggers
from comfyfleet.server.db.tenant_tables import graph_runs, pipeline_runs
from comfyfleet.server.db.tenant_tables import triggers as triggers_table
from comfyfleet.server.graphs import actions
from comfyfleet.server.graphs.actions import NewGraphRun, Owner
from comfyfleet.server.graphs.apply import GraphContext
from comfyfleet.server.graphs.store import StoredTrigger, TriggerFiring
from comfyfleet.server.maintenance.retention import begin_erasure, erase_pending_tenants
from comfyfleet.server.maintenance.sweeps import all_sweeps
from comfyfleet.server.pipelines import actions as pipelines
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.triggers import Delivery, NewTrigger

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)
ONE = graph([node("first"), output()], "first.output > result.value")
STEPS_MAX = 120


@dataclass
class TriggerSetup:
    graph_setup: GraphSetup
    clock: ManualClock

    @property
    def graphs(self) -> GraphContext:
        return self.graph_setup.graphs

    @property
    def owner(self) -> Owner:
        return self.graph_setup.owner

    @property
    def pool(self) -> Any:
        return self.graph_setup.plane.pools["main"]

    async def create(self, document: dict[str, Any] = ONE, **fields: Any) -> StoredTrigger:
        if "pipeline_id" not in fields:
            made = await actions.create_graph(self.graphs, self.owner, document)
            fields = {"graph_id": made.id, **fields}
        new = NewTrigger(**{"name": "t", "tokens_per_day": 50, "cron": "0 * * * *", **fields})
        return await triggers.create_trigger(self.graphs, self.owner, new)

    async def sweep(self, graphs: GraphContext | None = None) -> None:
        graphs = graphs or GraphContext(self.graphs.context)
        await triggers.fire_due(graphs, graphs.context.pools["main"])

    async def at(self, moment: datetime) -> None:
        self.clock.now = moment
        await self.sweep()

    async def firings(self, trigger: StoredTrigger) -> list[TriggerFiring]:
        """The oldest first."""
        found = await triggers.list_firings(self.graphs, self.owner, trigger.id, limit=100)
        return found[::-1]

    async def statuses(self, trigger: StoredTrigger) -> list[str]:
        return [each.status for each in await self.firings(trigger)]

    async def now(self, trigger: StoredTrigger) -> StoredTrigger:
        return await triggers.get_trigger(self.graphs, self.owner, trigger.id)

    async def count(self, table: Any = graph_runs) -> int:
        async with self.pool.read() as tx:
            return int(await tx.scalar(select(func.count()).select_from(table)) or 0)

    async def used(self, trigger: StoredTrigger) -> int:
        [use] = await triggers.day_uses(self.graphs, trigger)
        return use.tokens

    async def fire(self, trigger: StoredTrigger, key: str, body: Any = None) -> TriggerFiring:
        made, _ = await triggers.fire(
            self.graphs, trigger, cause=FiringCause.WEBHOOK, delivery=Delivery(key), body=body
        )
        return made


@asynccontextmanager
async def trigger_setup_on(
    databases: Databases, folder: Path, **more: Any
) -> AsyncIterator[TriggerSetup]:
    clock = ManualClock()
    clock.now = NOON - timedelta(minutes=30)
    async with graph_setup_on(databases, folder, clock=clock, **more) as graph_setup:
        await add_user(graph_setup, graph_setup.owner)
        yield TriggerSetup(graph_setup, clock)


async def add_user(graph_setup: GraphSetup, owner: Owner) -> None:
    async with graph_setup.plane.pools["main"].transaction() as tx:
        await tenants.create_user(
            tx, user_id=owner.user_id, tenant_id=owner.tenant_id, now=graph_setup.plane.clock()
        )


async def test_a_moment_starts_one_run_with_what_is_left(
    databases: Databases, tmp_path: Path
) -> None:
    async with trigger_setup_on(databases, tmp_path) as setup:
        made = await setup.create(tokens_per_day=5)
        assert made.next_at == NOON
        await setup.sweep()
        assert await setup.firings(made) == []
        for _ in range(3):
            await setup.at(NOON)
        [fired] = await setup.firings(made)
        assert (fired.status, fired.cause) == (FiringStatus.STARTED, FiringCause.SCHEDULE)
        assert (fired.planned_at, fired.granted_tokens) == (NOON, PRICE)
        assert fired.inputs is None
        run = await actions.get_run(setup.graphs, setup.owner, fired.run_id or uuid4())
        assert run.head.max_tokens == PRICE
        assert fired.run_status == run.run.status
        assert (await setup.now(made)).next_at == NOON + timedelta(hours=1)


async def test_the_sweep_fires_what_is_due(databases: Databases, tmp_path: Path) -> None:
    async with trigger_setup_on(databases, tmp_path) as setup:
        made = await setup.create()
        [sweep] = [each for each in all_sweeps(setup.graph_setup.plane) if each.name == "triggers"]
        assert sweep.is_due is not None
        assert not await sweep.is_due()
        setup.clock.now = NOON
        assert await sweep.is_due()
        assert await sweep.run() is False
        assert not await sweep.is_due()
        assert await setup.statuses(made) == ["started"]


async def test_a_spent_day_refuses_until_the_next_one_in_its_zone(
    databases: Databases, tmp_path: Path
) -> None:
    async with trigger_setup_on(databases, tmp_path) as setup:
        zone = "America/New_York"  # where the day ends at 5:00 UTC
        made = await setup.create(tokens_per_day=2 * PRICE, timezone=zone)
        for hours in range(4):
            await setup.at(NOON + timedelta(hours=hours))
        found = await setup.firings(made)
        assert [each.status for each in found] == ["started"] * 2 + ["refused"] * 2
        assert found[2].error_code == "limit_spent"
        assert "2026-11-16" in (found[2].error or "")
        setup.clock.now = datetime(2026, 11, 17, 4, tzinfo=UTC)
        assert await setup.used(made) == 2 * PRICE
        await setup.at(datetime(2026, 11, 17, 5, tzinfo=UTC))
        assert (await setup.statuses(made)).count("started") == 3
        assert await setup.used(made) == PRICE


async def test_an_open_run_holds_what_it_may_spend_and_gives_the_rest_back(
    databases: Databases, tmp_path: Path
) -> None:
    async with trigger_setup_on(databases, tmp_path) as setup:
        kept = await setup.create(FAN_OUT, cron=None, inputs={"widths": "body"}, tokens_per_day=10)
        three = await setup.fire(kept, "1", [1, 2, 3])
        assert (three.status, three.granted_tokens) == ("started", 9)
        assert (await setup.fire(kept, "2", [1])).error_code == "limit_spent"
        await actions.cancel_graph_run(setup.graphs, setup.owner, three.run_id or uuid4())
        await setup.graph_setup.sweep()
        assert await setup.used(kept) == 0
        assert (await setup.fire(kept, "3", [1])).status == "started"


async def test_a_run_that_costs_more_than_is_left_or_allowed_is_refused_with_the_truth(
    databases: Databases, tmp_path: Path
) -> None:
    async with trigger_setup_on(databases, tmp_path) as setup:
        inputs = {"widths": "body"}
        made = await setup.create(FAN_OUT, cron=None, inputs=inputs, tokens_per_day=3 * PRICE - 1)
        refused = await setup.fire(made, "1", [1, 2, 3])
        assert refused.error_code == "limit_spent"
        assert refused.error is not None
        assert f"a run costs at least {3 * PRICE}" in refused.error
        assert "nothing was started or stored; send it again the next day" in refused.error
        tight = await setup.create(
            FAN_OUT, cron=None, inputs=inputs, tokens_per_day=100, max_tokens=3 * PRICE - 1
        )
        refused = await setup.fire(tight, "1", [1, 2, 3])
        assert refused.error is not None
        assert f"limit per run is {3 * PRICE - 1}" in refused.error
        assert await setup.count() == 0
        assert (await setup.fire(tight, "2", [1, 2])).status == "started"


async def test_a_pipeline_whose_first_step_can_not_be_paid_is_not_started(
    databases: Databases, tmp_path: Path
) -> None:
    async with trigger_setup_on(databases, tmp_path) as setup:
        step = {"name": "Base", "workflow": "draw", "properties": {"width": 32}}
        whose = setup.owner.tenant_id, setup.owner.user_id
        stored = await pipelines.create_pipeline(
            setup.graphs.context, *whose, {"name": "p", "steps": [step]}
        )
        made = await setup.create(
            pipeline_id=stored.id, base_candidates=3, tokens_per_day=3 * PRICE - 1
        )
        await setup.at(NOON)
        [refused] = await setup.firings(made)
        assert refused.error_code == "limit_spent"
        assert refused.error is not None
        assert f"costs at least {3 * PRICE}; this run is skipped" in refused.error
        assert await setup.count(pipeline_runs) == 0


@pytest.mark.parametrize(
    "widths", [{"from": "body.rows"}, "{{ body.rows }}", "{{body}}", "rows", 5, ["wide"]]
)
async def test_a_webhook_whose_inputs_can_never_fit_is_refused(
    databases: Databases, tmp_path: Path, widths: Any
) -> None:
    async with trigger_setup_on(databases, tmp_path) as setup:
        with pytest.raises(InvalidInput, match=r"plain path such as body.rows"):
            await setup.create(FAN_OUT, cron=None, inputs={"widths": widths})
        for good in ("body.rows", "body.rows?", [1, 2]):
            await setup.create(FAN_OUT, cron=None, inputs={"widths": good})


async def test_firings_side_by_side_never_exceed_the_day(
    databases: Databases, tmp_path: Path
) -> None:
    async with trigger_setup_on(databases, tmp_path) as setup:
        made = await setup.create(cron=None, tokens_per_day=3 * PRICE + 1)
        found = await asyncio.gather(*(setup.fire(made, str(number)) for number in range(12)))
        assert sorted(each.status for each in found) == ["refused"] * 9 + ["started"] * 3
        assert sum(each.granted_tokens for each in found) == 3 * PRICE
        assert await setup.count() == 3


async def test_many_control_planes_fire_a_moment_once(databases: Databases, tmp_path: Path) -> None:
    async with trigger_setup_on(databases, tmp_path, tokens=1000) as setup:
        made = [await setup.create() for _ in range(5)]
        setup.clock.now = NOON
        await asyncio.gather(*(setup.sweep() for _ in range(8)))
        for each in made:
            assert await setup.statuses(each) == ["started"]
        assert await setup.count() == 5


async def test_a_firing_may_be_cut_anywhere(databases: Databases, tmp_path: Path) -> None:
    async with trigger_setup_on(databases, tmp_path, tokens=10_000) as setup:
        fuse, cuts = Fuse(), 0
        for steps in range(STEPS_MAX):
            made, before = await setup.create(), await setup.count()
            setup.clock.now = made.next_at or NOON
            fuse.left = steps
            is_cut = False
            try:
                await setup.sweep(GraphContext(fused(setup.graphs.context, fuse)))
            except ProcessDied:
                is_cut = True
            fuse.left = None
            # Another process comes, at once and when the time of the first is up.
            await setup.sweep()
            setup.clock.advance(seconds=triggers.TAKEN_SECONDS)
            await setup.sweep()
            assert await setup.statuses(made) == ["started"], steps
            assert await setup.count() == before + 1
            await triggers.delete_trigger(setup.graphs, setup.owner, made.id)
            cuts += is_cut
            if not is_cut:
                break
        else:
            pytest.fail("the firing has no end")
        assert cuts > 8


async def test_another_process_may_fire_at_any_step(databases: Databases, tmp_path: Path) -> None:
    async with trigger_setup_on(databases, tmp_path, tokens=10_000) as setup:
        fuse = Fuse()
        for steps in range(STEPS_MAX):
            made, before = await setup.create(), await setup.count()
            setup.clock.now = made.next_at or NOON
            fuse.left, fuse.meanwhile = steps, setup.sweep
            await setup.sweep(GraphContext(fused(setup.graphs.context, fuse)))
            assert await setup.statuses(made) == ["started"], steps
            assert await setup.count() == before + 1
            await triggers.delete_trigger(setup.graphs, setup.owner, made.id)
            if fuse.left is not None:
                break
        else:
            pytest.fail("the firing has no end")
        assert steps > 3


@pytest.mark.parametrize("catch_up", [False, True])
async def test_missed_moments_are_told_and_the_newest_is_caught_up_once_if_wanted(
    databases: Databases, tmp_path: Path, catch_up: bool
) -> None:
    async with trigger_setup_on(databases, tmp_path) as setup:
        made = await setup.create(catch_up=catch_up)
        for _ in range(2):
            await setup.at(NOON + timedelta(hours=3, minutes=20))
        now = await setup.now(made)
        assert (now.missed, now.missed_at) == (4, NOON + timedelta(hours=3))
        assert now.next_at == NOON + timedelta(hours=4)
        found = await setup.firings(made)
        [missed] = [each for each in found if each.status == "missed"]
        assert (missed.missed, missed.run_id) == (4, None)
        assert [each.cause for each in found if each.run_id] == ["catch_up"] * catch_up
        assert await setup.count() == catch_up


async def test_a_paused_trigger_waits_and_has_missed_nothing(
    databases: Databases, tmp_path: Path
) -> None:
    async with trigger_setup_on(databases, tmp_path) as setup:
        made = await setup.create()
        await triggers.pause_trigger(setup.graphs, setup.owner, made.id)
        await setup.at(NOON + timedelta(hours=5))
        assert await setup.firings(made) == []
        await triggers.resume_trigger(setup.graphs, setup.owner, made.id)
        now = await triggers.resume_trigger(setup.graphs, setup.owner, made.id)
        assert (now.missed, now.next_at) == (0, NOON + timedelta(hours=6))
        await setup.at(NOON + timedelta(hours=6))
        assert await setup.statuses(made) == ["started"]


async def test_what_can_not_be_started_is_refused_and_says_why(
    databases: Databases, tmp_path: Path
) -> None:
    async with trigger_setup_on(databases, tmp_path, tokens=1) as setup:
        made = await setup.create()
        await setup.at(NOON)
        other = await setup.create(graph([node("other"), output()], "other.output > result.value"))
        await actions.delete_graph(setup.graphs, setup.owner, other.graph_id or uuid4())
        await setup.at(NOON + timedelta(hours=1))
        async with setup.pool.transaction() as tx:
            whose = setup.owner.tenant_id, setup.owner.user_id
            await tenants.set_user_active(tx, *whose, is_active=False)
        await setup.at(NOON + timedelta(hours=2))
        codes = [each.error_code for each in await setup.firings(made)]
        assert codes == ["insufficient_tokens", "insufficient_tokens", "forbidden"]
        assert [each.error_code for each in await setup.firings(other)] == [
            "not_found",
            "forbidden",
        ]
        assert await setup.count() == 0


async def test_one_delivery_starts_one_run(databases: Databases, tmp_path: Path) -> None:
    async with trigger_setup_on(databases, tmp_path) as setup:
        document = graph(
            [{"id": "wide", "type": "input", "value_type": "integer"}, node("first"), output()],
            "wide.value > first.width",
            "first.output > result.value",
        )
        made = await setup.create(document, cron=None, inputs={"wide": "body.sizes.0"})
        found = await asyncio.gather(
            *(setup.fire(made, "d-1", {"sizes": [64]}) for _ in range(6)),
            setup.fire(made, "d-2", {"sizes": [32]}),
        )
        assert len({each.id for each in found}) == 2 == await setup.count()
        again = await setup.fire(made, "d-1", {"other": True})
        assert again.status == "started"
        run = await actions.get_run(setup.graphs, setup.owner, again.run_id or uuid4())
        assert run.head.inputs == {"wide": 64}
        bad = await setup.fire(made, "d-3", {"sizes": ["wide"]})
        assert (bad.status, bad.error_code) == ("refused", "invalid_input")
        lacking = await setup.fire(made, "d-4", {})
        assert "body.sizes.0" in (lacking.error or "")


async def test_a_repeated_delivery_has_the_answer_of_the_first_also_if_that_was_cut(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triggers, "LOOK_SECONDS", 0.001)
    async with trigger_setup_on(databases, tmp_path, tokens=10_000) as setup:
        made = await setup.create(cron=None, tokens_per_day=10_000)
        fuse, left_starting = Fuse(), 0

        async def deliver(graphs: GraphContext, key: str) -> tuple[TriggerFiring, bool]:
            cause = FiringCause.WEBHOOK
            return await triggers.fire(
                graphs, made, cause=cause, delivery=Delivery(key, Signature(1, key)), body=None
            )

        for steps in range(STEPS_MAX):
            before, fuse.left = await setup.count(), steps
            try:
                await deliver(GraphContext(fused(setup.graphs.context, fuse)), str(steps))
            except ProcessDied:
                left_starting += "starting" in await setup.statuses(made)
            is_cut, fuse.left = fuse.left == 0, None
            both = await asyncio.gather(*(deliver(setup.graphs, str(steps)) for _ in range(2)))
            runs = {(each.status, each.run_id) for each, _ in both}
            assert [status for status, _ in runs] == [FiringStatus.STARTED], steps
            assert await setup.count() == before + 1
            if not is_cut:
                break
        assert left_starting > 2


async def test_refusals_without_end_are_answered_and_not_kept(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triggers, "REFUSALS_PER_DAY_MAX", 3)
    async with trigger_setup_on(databases, tmp_path) as setup:
        made = await setup.create(cron=None, tokens_per_day=PRICE)
        assert (await setup.fire(made, "first")).status == "started"
        found = [await setup.fire(made, str(number)) for number in range(6)]
        assert {each.error_code for each in found} == {"limit_spent"}
        assert (await setup.statuses(made)).count("refused") == 3


async def test_a_time_zone_that_is_gone_pauses_its_trigger_alone(
    databases: Databases, tmp_path: Path
) -> None:
    async with trigger_setup_on(databases, tmp_path) as setup:
        lost, kept = await setup.create(), await setup.create()
        async with setup.pool.transaction() as tx:
            gone = update(triggers_table).where(triggers_table.c.id == lost.id)
            await tx.execute(gone.values(timezone="Atlantis/Poseidon"))
        await setup.at(NOON)
        assert (await setup.now(lost)).is_paused
        assert await setup.used(lost) == 0
        with pytest.raises(InvalidInput):
            await triggers.resume_trigger(setup.graphs, setup.owner, lost.id)
        assert await setup.statuses(kept) == ["started"]


async def test_a_pipeline_gets_the_limit_as_its_own(databases: Databases, tmp_path: Path) -> None:
    async with trigger_setup_on(databases, tmp_path) as setup:
        document = {
            "name": "p",
            "steps": [
                {"name": "Base", "workflow": "draw", "properties": {"width": "{{ variables.w }}"}}
            ],
        }
        whose = setup.owner.tenant_id, setup.owner.user_id
        stored = await pipelines.create_pipeline(setup.graphs.context, *whose, document)
        made = await setup.create(
            pipeline_id=stored.id, base_candidates=2, inputs={"w": 32}, max_tokens=20
        )
        for hours in range(3):
            await setup.at(NOON + timedelta(hours=hours))
        found = await setup.firings(made)
        assert [each.granted_tokens for each in found] == [20, 20, 10]
        run = await pipelines.get_run(setup.graphs.context, *whose, found[0].run_id or uuid4())
        assert (run.run.limits.tokens, run.run.variables) == (20, {"w": 32})
        assert found[0].run_status == "active"
        await pipelines.cancel_run(setup.graphs.context, *whose, run.id)
        assert await setup.used(made) == 30
        assert await setup.count(pipeline_runs) == 3


async def test_triggers_of_others_are_not_there(databases: Databases, tmp_path: Path) -> None:
    async with trigger_setup_on(databases, tmp_path) as setup:
        made = await setup.create()
        stranger = await new_owner(setup.graph_setup.plane, 0)
        colleague = replace(setup.owner, user_id=uuid4())
        for other in (stranger, colleague):
            for act in (
                triggers.get_trigger,
                triggers.pause_trigger,
                triggers.resume_trigger,
                triggers.renew_secret,
                triggers.delete_trigger,
            ):
                with pytest.raises(NotFound):
                    await act(setup.graphs, other, made.id)
            with pytest.raises(NotFound):
                await triggers.list_firings(setup.graphs, other, made.id, limit=5)
            assert await triggers.list_triggers(setup.graphs, other, limit=5) == []
        graph_id = made.graph_id
        with pytest.raises(NotFound):
            await triggers.create_trigger(
                setup.graphs, stranger, NewTrigger("t", 5, graph_id=graph_id, cron="0 0 * * *")
            )


@pytest.mark.parametrize(
    "fields",
    [
        {"cron": "never"},
        {"timezone": "Nowhere"},
        {"inputs": {"unknown": 1}},
        {"base_candidates": 3},
        {"graph_id": None},
        {"cron": None, "inputs": {"first": "body..x"}},
    ],
)
async def test_what_could_never_fire_is_refused(
    databases: Databases, tmp_path: Path, fields: dict[str, Any]
) -> None:
    async with trigger_setup_on(databases, tmp_path) as setup:
        with pytest.raises(InvalidInput):
            await setup.create(**fields)


async def test_a_user_has_so_many_triggers_and_no_more(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triggers, "TRIGGERS_PER_USER_MAX", 2)
    async with trigger_setup_on(databases, tmp_path) as setup:
        await setup.create()
        await setup.create()
        with pytest.raises(LimitExceeded):
            await setup.create()


async def test_an_erased_tenant_fires_nothing_and_leaves_nothing(
    databases: Databases, tmp_path: Path
) -> None:
    async with trigger_setup_on(databases, tmp_path) as setup:
        made = await setup.create()
        await setup.at(NOON)
        context = setup.graphs.context
        await begin_erasure(context, setup.owner.tenant_id, actor="admin", now=setup.clock())
        await setup.at(NOON + timedelta(hours=1))
        assert [each.error_code for each in await setup.firings(made)] == [None, "conflict"]
        await erase_pending_tenants(context)
        with pytest.raises(NotFound):
            await setup.now(made)


async def test_a_run_started_by_hand_with_the_key_of_a_firing_is_that_firing(
    databases: Databases, tmp_path: Path
) -> None:
    async with trigger_setup_on(databases, tmp_path) as setup:
        made = await setup.create()
        await setup.at(NOON)
        [fired] = await setup.firings(made)
        again, is_new = await actions.start_run(
            setup.graphs,
            setup.owner,
            made.graph_id or UUID(int=0),
            NewGraphRun({}, max_tokens=PRICE, idempotency_key=f"trigger/{fired.id}"),
        )
        assert (again.head.id, is_new) == (fired.run_id, False)
