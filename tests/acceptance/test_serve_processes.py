"""`comfyfleet serve --processes 2`: several processes behind one port, killed and replaced under load."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.mmap_dict import MmapedDict
from tests.support.server.admin_client import until
from tests.support.server.customers import DRAWN
from tests.support.server.deployment import Deployment

# Seven processes are started, one after another.
pytestmark = pytest.mark.slow
PROCESSES = 2
CUSTOMERS, WORKERS = 3, 3
PRICE, TOKENS = 2, 100_000
AWAY_SECONDS_MAX = 30
RESTART_SECONDS_MAX = 180
WAITING_MAX = 10
WOKEN = {"graph_words", "pipeline_results"}


@dataclass(frozen=True)
class Fleet:
    """A control plane of several processes with customers and a fleet without workers."""

    deployment: Deployment
    secret: str
    key: str
    effect_id: str

    def children(self) -> list[int]:
        pid = self.deployment.control.pid
        return [int(each) for each in _proc(pid, f"task/{pid}/children").split()]

    def metrics(self, name: str) -> dict[str, float]:
        """Series of that name, by their labels."""
        text = httpx.get(f"{self.deployment.url}/metrics", timeout=20).text
        found = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
        return {labels: float(value) for labels, value in found}

    def wallet(self) -> dict[str, Any]:
        answer = httpx.get(
            f"{self.deployment.url}/api/wallet", headers=_bearer(self.key), timeout=20
        )
        wallet: dict[str, Any] = answer.json()
        return wallet


def _proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except FileNotFoundError:
        return ""


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    deployment = Deployment(
        tmp_path_factory.mktemp("processes"),
        sweep_seconds="1",
        max_active_jobs_per_user="100000",
        calls_per_second="100000",
        calls_at_once="100000",
        tenant_calls_per_second="100000",
        tenant_calls_at_once="100000",
    )
    asyncio.run(deployment.__aenter__())
    try:
        deployment.start_control("--processes", str(PROCESSES))
        yield _set_up(deployment)
    finally:
        asyncio.run(deployment.__aexit__(None, None, None))


def _set_up(deployment: Deployment) -> Fleet:
    ask = deployment.admin.ask
    secret = deployment.admin.create_fleet("gpus")
    deployment.admin.register_workflow("draw", DRAWN, [], "2")
    deployment.admin.assign("gpus", "draw")
    effect = {"slug": "draw", "workflow_slug": "draw", "price_tokens": PRICE, "published": True}
    effect_id = ask("POST", "/api/admin/effects", json=effect)["id"]
    tenant = ask("POST", "/api/admin/tenants", json={"name": "acme"})
    path = f"/api/admin/tenants/{tenant['id']}/wallets/{tenant['user_id']}/credits"
    ask("POST", path, json={"amount": TOKENS, "provider_transaction_id": "first"})
    until(lambda: "2 processes serve" in deployment.control.said(), seconds=AWAY_SECONDS_MAX)
    return Fleet(deployment, secret, tenant["key"], effect_id)


class Caller:
    """One kept connection. `is_patient`: what fails for a restart is asked again."""

    def __init__(self, url: str, *, is_patient: bool) -> None:
        self._http = httpx.Client(base_url=url, timeout=20)
        self._is_patient = is_patient

    def close(self) -> None:
        self._http.close()

    def ask(self, method: str, path: str, key: str = "", **given: Any) -> Any:
        deadline = time.monotonic() + AWAY_SECONDS_MAX
        while True:
            try:
                answer = self._http.request(method, path, **{"headers": _bearer(key), **given})
                if answer.is_success:
                    return answer.json() if answer.content else None
                if answer.status_code < 500 or not self._is_patient:
                    raise AssertionError(f"{path}: {answer.status_code} {answer.text}")
            except httpx.TransportError:
                if not self._is_patient or time.monotonic() > deadline:
                    raise
            time.sleep(0.05)


@dataclass
class Load:
    """Customers and workers, until it is told to stop; then what waits is worked off."""

    fleet: Fleet
    is_patient: bool
    submitted: int = 0
    completed: int = 0
    is_over: bool = False

    def customer(self, number: int) -> None:
        with closing(Caller(self.fleet.deployment.url, is_patient=self.is_patient)) as caller:
            self._submit(caller, number)

    def _submit(self, caller: Caller, number: int) -> None:
        count = 0
        while not self.is_over:
            key = f"{id(self)}-{number}-{count}"
            body = {"effect_id": self.fleet.effect_id, "idempotency_key": key}
            job = caller.ask("POST", "/api/ai-jobs", self.fleet.key, json=body)
            caller.ask("GET", f"/api/ai-jobs/{job['id']}", self.fleet.key)
            count += 1
            self.submitted += 1
            while self.submitted - self.completed > WAITING_MAX and not self.is_over:
                time.sleep(0.01)

    def worker(self, number: int) -> None:
        with closing(Caller(self.fleet.deployment.url, is_patient=self.is_patient)) as caller:
            self._work(caller, number)

    def _work(self, caller: Caller, number: int) -> None:
        name = f"worker-{id(self)}-{number}"
        key = caller.ask(
            "POST",
            "/api/worker/register",
            json={"worker_id": name, "fleet_slug": "gpus"},
            headers={"X-Fleet-Secret": self.fleet.secret},
        )["token"]
        poll = {"worker_id": name, "wait_seconds": 1, "held": []}
        while not self.is_over or self.completed < self.submitted:
            job = caller.ask("POST", "/api/worker/poll", key, json=poll)["job"]
            if job is not None:
                self._deliver(caller, key, job)

    def _deliver(self, caller: Caller, key: str, job: dict[str, Any]) -> None:
        slot = job["outputs"][0]
        put = httpx.URL(slot["url"])
        caller.ask("PUT", put.raw_path.decode(), content=b"made", headers=slot["headers"])
        done = {name: job[name] for name in ("dispatch_id", "lease_token")}
        outputs = [{"name": slot["name"], "size": 4, "content_type": "image/png"}]
        caller.ask("POST", "/api/worker/complete", key, json={**done, "outputs": outputs})
        self.completed += 1


@contextmanager
def under_load(fleet: Fleet, *, is_patient: bool) -> Iterator[Load]:
    """Nobody's call fails, and everything that was submitted is completed and paid once."""
    load, before = Load(fleet, is_patient), fleet.wallet()["balance"]
    with ThreadPoolExecutor(CUSTOMERS + WORKERS) as pool:
        working: list[Future[None]] = [
            pool.submit(load.customer, each) for each in range(CUSTOMERS)
        ]
        working += [pool.submit(load.worker, each) for each in range(WORKERS)]
        try:
            until(
                lambda: load.completed >= 10 or _failed(working),
                seconds=AWAY_SECONDS_MAX,
                what=lambda: f"{load}: {fleet.deployment.control.said()[-2000:]}",
            )
            yield load
            more = load.completed + 10
            until(lambda: load.completed >= more or _failed(working), seconds=AWAY_SECONDS_MAX)
        finally:
            load.is_over = True
        for each in working:
            each.result(timeout=AWAY_SECONDS_MAX)
    assert load.completed == load.submitted
    assert before - fleet.wallet()["balance"] == PRICE * load.submitted


def _failed(working: list["Future[None]"]) -> bool:
    return any(each.done() for each in working)


def test_all_of_them_answer_and_their_counters_are_told_together(fleet: Fleet) -> None:
    before = fleet.metrics("comfyfleet_api_calls_total")
    with (
        httpx.Client(base_url=fleet.deployment.url) as one,
        httpx.Client(base_url=fleet.deployment.url),
    ):
        for _ in range(20):
            assert one.get("/healthz").status_code == 200
            assert httpx.get(f"{fleet.deployment.url}/healthz").status_code == 200
    labels = 'method="GET",route="/healthz",status="200"'
    for _ in range(4):  # whichever process is asked
        told = fleet.metrics("comfyfleet_api_calls_total")
        assert told[labels] - before.get(labels, 0) == 40
        assert fleet.metrics("comfyfleet_figures_readable") == {"": 1.0}


def test_only_the_first_of_them_runs_the_sweeps(fleet: Fleet) -> None:
    """But for those that are woken by what happens in a process."""
    until(
        lambda: _sweeps_of(fleet, 0) >= {"outbox", "files", "graphs", "ledger", *WOKEN},
        seconds=AWAY_SECONDS_MAX,
    )
    until(lambda: _sweeps_of(fleet, 1) >= {"graph_words"}, seconds=AWAY_SECONDS_MAX)
    assert _sweeps_of(fleet, 1) <= WOKEN


def _sweeps_of(fleet: Fleet, number: int) -> set[str]:
    """Those of which the process with that number has counted a pass, whatever came of it."""
    environ = dict(
        each.partition("=")[::2] for each in _proc(fleet.children()[0], "environ").split("\0")
    )
    counters = Path(environ["PROMETHEUS_MULTIPROC_DIR"]) / f"counter_{number}.db"
    read = MmapedDict.read_all_values_from_file(str(counters))  # type: ignore[no-untyped-call]
    keys = [json.loads(each[0]) for each in read]
    return {labels["sweep"] for name, _, labels, _ in keys if name == "comfyfleet_sweep_passes"}


def test_a_process_that_is_killed_is_replaced_and_no_job_is_lost(fleet: Fleet) -> None:
    ended = fleet.metrics("comfyfleet_api_calls_total")
    for victim in fleet.children():  # the one with the sweeps, too
        with under_load(fleet, is_patient=True):
            os.kill(victim, signal.SIGKILL)
            until(
                lambda gone=victim: (
                    gone not in fleet.children()  # type: ignore[misc]
                    and len(fleet.children()) == PROCESSES
                ),
                seconds=AWAY_SECONDS_MAX,
            )
    now = fleet.metrics("comfyfleet_api_calls_total")
    assert all(now[labels] >= count for labels, count in ended.items()), "counters never go back"


def test_sweeps_go_on_when_the_process_that_ran_them_is_gone(fleet: Fleet) -> None:
    since = time.time()
    name = "comfyfleet_sweep_last_pass_timestamp_seconds"

    def have_passed() -> bool:
        passed = fleet.metrics(name)
        return min(passed['sweep="graphs"'], passed['sweep="graph_words"']) > since

    until(have_passed, seconds=AWAY_SECONDS_MAX)


def test_all_are_replaced_one_by_one_and_no_call_fails(fleet: Fleet) -> None:
    before = set(fleet.children())
    with under_load(fleet, is_patient=False):
        os.kill(fleet.deployment.control.pid, signal.SIGHUP)
        until(
            lambda: not before & set(fleet.children()) and len(fleet.children()) == PROCESSES,
            seconds=RESTART_SECONDS_MAX,
            what=lambda: fleet.deployment.control.said()[-2000:],
        )
        assert fleet.deployment.admin.is_ready()


def test_a_stop_ends_all_of_them_and_so_does_the_parents_death(fleet: Fleet) -> None:
    children = fleet.children()
    fleet.deployment.control.terminate()
    assert fleet.deployment.control.wait() == 0
    assert not any(_proc(pid, "cmdline") for pid in children)
    fleet.deployment.start_control("--processes", str(PROCESSES))
    children = fleet.children()
    os.kill(fleet.deployment.control.pid, signal.SIGKILL)
    _gone(lambda: not any(_proc(pid, "cmdline") for pid in children))


def _gone(condition: Callable[[], bool]) -> None:
    until(condition, seconds=AWAY_SECONDS_MAX)
