"""Guards that a run can remove, to show that the audit notices that they are missing.

A guard in the databases is removed by SQL before the load starts; a guard in the code by a change of
the source that every control plane of the run imports (see `hook/sitecustomize.py`).
"""

import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.chaos.world import World


@dataclass(frozen=True)
class Change:
    """Replaces a text that occurs once in a module's source."""

    module: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutation:
    why: str
    changes: Sequence[Change] = ()
    central: Sequence[str] = ()
    pools: Sequence[str] = ()
    faults: Sequence[str] = field(default=())  # kinds that make the missing guard matter
    check: str = ""  # the check that has to notice; default: any that is not about errors


_REPORTS = ("reports doubled", "reports replayed", "reports late", "network cut", "worker stop")
_LOST_OUTBOX_ROWS = """
CREATE FUNCTION lose_row() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN IF random() < 0.3 THEN RETURN NULL; END IF; RETURN NEW; END $$;
CREATE TRIGGER lose_row BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION lose_row();
"""
_NO_FENCE = (
    Change(
        "comfyfleet.server.jobs.store",
        '    ai_jobs.c.status == JobStatus.PROCESSING,\n    ai_jobs.c.lease_token == bindparam("of_token"),\n',
        '    bindparam("of_token", type_=ai_jobs.c.lease_token.type).is_not(None),\n',
    ),
    Change(
        "comfyfleet.server.queue.store.writes",
        'of.append(d.c.lease_token == bindparam("of_token"))',
        'of.append(bindparam("of_token", type_=d.c.lease_token.type).is_not(None))',
    ),
)
MUTATIONS: Mapping[str, Mutation] = {
    "lease-fence": Mutation(
        "a worker that lost its lease can still end the job", changes=_NO_FENCE, faults=_REPORTS
    ),
    "unique-dispatch": Mutation(
        "a job can be queued twice",
        central=(
            "ALTER TABLE ai_job_dispatches"
            " DROP CONSTRAINT ai_job_dispatches_tenant_id_tenant_job_id_unique",
        ),
        faults=("central immediate", "central terminate", "plane kill", "plane stop"),
    ),
    "outbox-row": Mutation(
        "three of ten messages between the databases are lost",
        pools=(_LOST_OUTBOX_ROWS,),
        faults=("central immediate", "central terminate", "plane kill"),
    ),
    "ledger-index": Mutation(
        "a reservation can be settled twice by a worker that lost its lease",
        changes=_NO_FENCE,  # with the fence, no second settlement gets as far as the ledger
        pools=(
            "DROP INDEX token_transactions_settled",
            "ALTER TABLE token_transactions"
            " DROP CONSTRAINT token_transactions_tenant_id_job_id_type_unique",
        ),
        faults=_REPORTS,
        check="the ledger is exact",
    ),
    "run-log": Mutation(
        "a repeated report is logged again",
        changes=(
            Change(
                "comfyfleet.server.jobs.files",
                "return state if state is not None and state.holds(token) else None",
                "return state._replace(is_reported=False)"
                " if state is not None and state.holds(token) else None",
            ),
        ),
        pools=("DROP INDEX run_events_report",),
        faults=("reports doubled", "reports replayed"),
        check="a prompt has one history record",
    ),
    "delivery-keys": Mutation(
        "a repeated delivery starts another run",
        changes=(
            Change(
                "comfyfleet.server.triggers",
                "        if self.id is not None:\n            return uuid5(",
                "        if False:\n            return uuid5(",
            ),
            Change(
                "comfyfleet.server.triggers",
                "def key_hashes(self, cause: FiringCause) -> list[str]:\n",
                "def key_hashes(self, cause: FiringCause) -> list[str]:\n        return []\n",
            ),
        ),
    ),
    "job-keys": Mutation(
        "two requests with one idempotency key at the same time make two jobs",
        pools=("DROP INDEX ai_jobs_key",),
    ),
}


# A missing guard shows in what is stored. Errors and tracebacks have many causes, and show nothing.
ERRORS = frozenset({"no answer is 500", "no log has a traceback", "memory is flat"})


def caught_by(name: str, violations: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the checks that noticed that the guard is missing."""
    check = MUTATIONS[name].check
    return [
        text
        for text, wrong in violations.items()
        if wrong and (text == check if check else text not in ERRORS)
    ]


async def remove_guard(world: "World", name: str) -> None:
    """Removes the part of a guard that is in the databases."""
    import asyncpg
    from tests.chaos.world import POOLS

    mutation = MUTATIONS[name]
    statements = {world.central_url(): mutation.central}
    statements |= {world.pool_url(pool): mutation.pools for pool in POOLS}
    for url, texts in statements.items():
        connection = await asyncpg.connect(url)
        try:
            for text in texts:
                await connection.execute(text)
        finally:
            await connection.close()


def weaken_code(name: str) -> None:
    """Changes the source of modules when they are imported."""
    changes: dict[str, list[Change]] = {}
    for change in MUTATIONS[name].changes:
        changes.setdefault(change.module, []).append(change)
    get_code = importlib.machinery.SourceFileLoader.get_code

    def changed(loader: importlib.machinery.SourceFileLoader, module: str) -> CodeType | None:
        if module not in changes:
            return get_code(loader, module)
        source = loader.get_source(module) or ""
        for change in changes[module]:
            if source.count(change.old) != 1:
                sys.exit(f"the mutation {name} no longer fits {module}")
            source = source.replace(change.old, change.new)
        code: CodeType = compile(source, loader.get_filename(module), "exec")
        return code

    importlib.machinery.SourceFileLoader.get_code = changed  # type: ignore[method-assign, assignment]
