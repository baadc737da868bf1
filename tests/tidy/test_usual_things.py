"""Things that every service of this kind has are found under the names that engineers search for."""

import ast
from collections import defaultdict
from functools import cache

import pytest
from tests.tidy.figures import package_modules

# The usual word, and the package, module, class or function that has it in its name.
USUAL_THINGS = {
    "advisory lock": "AdvisoryLocks",
    "affinity": "affinities",
    "audit": "record_audit",
    "backoff": "backoff_seconds",
    "cache": "TtlCache",
    "cursor": "parse_cursor",
    "drain": "drain_worker",
    "fair share": "FairShare",
    "fallback": "Fallback",
    "group commit": "GroupCommit",
    "health": "BackendHealth",
    "heartbeat": "HeartbeatLoop",
    "idempotency": "idempotency",
    "ingest": "ingest",
    "journal": "Journal",
    "lease": "lease",
    "ledger": "LedgerTransaction",
    "log context": "log_context",
    "long poll": "LongPollResponse",
    "metrics": "metrics",
    "middleware": "middleware",
    "migration": "migrations",
    "object store": "ObjectStore",
    "orphan": "remove_orphans",
    "outbox": "outbox",
    "page": "JobPage",
    "presigned url": "PresignedUrl",
    "rate limit": "RateLimiter",
    "reconcile": "reconcile",
    "refund": "refund",
    "requeue": "requeue",
    "reserve": "reserve",
    "retention": "retention",
    "shutdown": "shutdown",
    "signature": "is_signature_valid",
    "retry": "retry",
    "sse": "sse",
    "ssrf": "ssrf",
    "sweep": "SweepRunner",
    "throttle": "WrongKeyThrottle",
    "upload": "create_upload",
    "wallet": "wallet",
    "webhook": "webhooks",
}
THINGS_MIN = 34


@cache
def places() -> dict[str, set[str]]:
    """Where each package, module, class and function is, by its name."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in package_modules():
        found[module.path.stem].add(module.name)
        found[module.path.parent.name].add(module.name)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found[node.name].add(module.name)
    return found


@pytest.mark.parametrize("thing", USUAL_THINGS)
def test_a_usual_thing_has_its_usual_name(thing: str) -> None:
    name = USUAL_THINGS[thing]
    assert places().get(name), f"{thing}: nothing is named {name} any more"
    squeezed = name.replace("_", "").lower()
    stem = thing.replace(" ", "").removesuffix("y")  # affinity, affinities
    assert stem in squeezed, f"{thing} is not what {name} is found by"


def test_the_list_is_as_long_as_it_was() -> None:
    assert len(USUAL_THINGS) >= THINGS_MIN
