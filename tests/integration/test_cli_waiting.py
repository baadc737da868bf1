"""Commands that wait end with exit code 3 and the required action when only a person can help."""

import io
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from rich.console import Console
from tests.support.server.command_process import started
from tests.support.server.commands import NEGATIVE, NOW, Result, comfyfleet

from comfyfleet.cli.context import CliContext
from comfyfleet.cli.main import run as run_command

KEY = r"export COMFYFLEET_URL=(\S+) COMFYFLEET_KEY=(\w{64})"
PIPELINE = "name: One\nsteps: [{name: Base, workflow: WORKFLOW}]\n"
JUDGED = "name: Two\nsteps: [{name: Base, workflow: WORKFLOW, needs_approval: true}, {name: Next, workflow: WORKFLOW}]\n"
GRAPH = """
name: One
nodes: [{id: draw, type: workflow, workflow: WORKFLOW}, {id: out, type: output}]
connections: [{from: draw.output, to: out.value}]
"""
ASKING = """
name: Asking
nodes:
  - {id: draw, type: workflow, workflow: WORKFLOW}
  - {id: ask, type: approve, message: Is it good?}
  - {id: out, type: output}
connections: [{from: draw.output, to: ask.input}, {from: ask.approved, to: out.value}]
"""


class Shop:
    """`comfyfleet up` with a workflow for two tokens, and a customer."""

    def __init__(self, url: str, key: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.operator = {"COMFYFLEET_URL": url, "COMFYFLEET_KEY": key}

    def admin(self, *words: str) -> Result:
        done = comfyfleet("admin", *words, environ=self.operator)
        assert done.code == 0, done.err
        return done

    def customer(self, tokens: int) -> dict[str, str]:
        tenant = self.admin("tenants", "create", "Ada", "--json").json
        if tokens:
            path = f"tenants/{tenant['id']}/wallets/{tenant['user_id']}/credits"
            body = {"amount": tokens, "provider_transaction_id": tenant["user_id"]}
            headers = {"Authorization": f"Bearer {self.operator['COMFYFLEET_KEY']}"}
            paid = httpx.post(f"{self.url}/api/admin/{path}", json=body, headers=headers)
            assert paid.is_success, paid.text
        return {"COMFYFLEET_URL": self.url, "COMFYFLEET_KEY": tenant["key"]}

    def file(self, text: str, slug: str = "negative") -> str:
        path = self.folder / "document.yaml"
        path.write_text(text.replace("WORKFLOW", slug))
        return str(path)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("up")
    settings = {"COMFYFLEET_NO_BACKEND_SECONDS": "1", "COMFYUI_SUBMIT_INTERVAL": "0.2"}
    with started("up", "--port", "0", folder=folder, **settings) as running:
        running.wait_for_line("Worker built-in in fleet default/production")
        found = running.wait_for_line(KEY)
        shop = Shop(found[1], found[2], folder)
        shop.admin("workflows", "register", "negative", NEGATIVE, "--price", "2")
        shop.admin("submit", "negative", "--wait")
        yield shop


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A shop without any worker."""
    folder = tmp_path_factory.mktemp("idle")
    settings = {"COMFYFLEET_NO_BACKEND_SECONDS": "1", "COMFYUI_SUBMIT_INTERVAL": "0.2"}
    with started("up", "--no-worker", "--port", "0", folder=folder, **settings) as running:
        found = running.wait_for_line(KEY)
        shop = Shop(found[1], found[2], folder)
        running.wait_for_line("Any ComfyUI client can use")
        shop.admin("workflows", "register", "nowhere", NEGATIVE, "--price", "0")
        shop.admin("fleets", "assign", "default", "nowhere", "--add")
        yield shop


def test_missing_tokens_end_a_wait_immediately(shop: Shop) -> None:
    poor = shop.customer(0)
    done = comfyfleet("pipeline", "run", shop.file(PIPELINE), "--wait", environ=poor)
    assert done.code == 3, done.err
    assert "Insufficient token balance. Resolve this problem" in done.err
    run = done.out.strip()
    followed = comfyfleet("pipeline", "status", run, "--follow", environ=poor)
    assert followed.code == 3


def test_a_wait_right_after_the_problem_was_solved_goes_on(shop: Shop) -> None:
    shop.admin("workflows", "register", "again", NEGATIVE, "--price", "0")
    customer = shop.customer(0)
    pipeline = comfyfleet("pipeline", "create", shop.file(PIPELINE, "again"), environ=customer)
    shop.admin("workflows", "withdraw", "again")
    done = comfyfleet("pipeline", "run", pipeline.out.strip(), "--wait", environ=customer)
    assert done.code == 3, done.err
    assert "isn't currently offered" in done.err
    run = done.out.strip()
    shop.admin("workflows", "offer", "again", "--price", "0")
    followed = comfyfleet("pipeline", "status", run, "--follow", environ=customer)
    assert followed.code == 0, followed.err
    shown = comfyfleet("pipeline", "status", run, "--json", environ=customer).json
    assert shown["reason"] == "complete"


def test_a_withdrawn_workflow_ends_a_wait_immediately(shop: Shop) -> None:
    shop.admin("workflows", "register", "brief", NEGATIVE, "--price", "0")
    customer = shop.customer(0)
    pipeline = comfyfleet("pipeline", "create", shop.file(PIPELINE, "brief"), environ=customer)
    shop.admin("workflows", "deactivate", "brief")
    done = comfyfleet("pipeline", "run", pipeline.out.strip(), "--wait", environ=customer)
    assert done.code == 3, done.err
    assert "brief" in done.lines[-2]


def test_a_graph_that_cannot_be_paid_ends_with_the_required_action(shop: Shop) -> None:
    poor = shop.customer(0)
    refused = comfyfleet("graph", "run", shop.file(GRAPH), "--watch", environ=poor)
    assert refused.code == 3, refused.err
    assert "Add tokens to the wallet" in refused.err
    unwatched = comfyfleet("graph", "run", shop.file(GRAPH), environ=poor)
    assert unwatched.code == 1, unwatched.err


def test_a_rerun_that_cannot_be_paid_ends_with_the_required_action(shop: Shop) -> None:
    customer = shop.customer(2)
    run = comfyfleet("graph", "run", shop.file(GRAPH), "--watch", environ=customer).out.split()[0]
    again = ("graph", "rerun", run, "--from", "draw")
    refused = comfyfleet(*again, "--watch", environ=customer)
    assert refused.code == 3, refused.err
    assert "Add tokens to the wallet" in refused.err
    assert comfyfleet(*again, environ=customer).code == 1


@pytest.mark.parametrize(
    ("command", "action"),
    [
        ("deactivate", "Ask the operator to offer the workflow again"),
        ("pause", "Ask the operator to resume the workflow"),
    ],
)
def test_a_queued_job_of_a_stopped_workflow_ends_a_wait_with_the_right_action(
    idle: Shop, command: str, action: str
) -> None:
    slug, customer = f"stopped-by-{command}", idle.customer(0)
    idle.admin("workflows", "register", slug, NEGATIVE, "--price", "0")
    idle.admin("effects", "create", slug, slug, "--price", "0", "--publish")
    job = comfyfleet("effects", "run", slug, environ=customer).out.strip()
    idle.admin("workflows", command, slug)
    waited = comfyfleet("jobs", "wait", job, environ=customer)
    assert waited.code == 3, waited.err
    assert action in waited.err
    assert "Start a worker" not in waited.err


def test_a_retry_that_no_worker_can_run_ends_with_the_required_action(idle: Shop) -> None:
    customer = idle.customer(0)
    document = idle.file(GRAPH, "nowhere")
    failed = comfyfleet("graph", "run", document, "--watch", environ=customer)
    run = failed.out.strip()
    assert f"comfyfleet graph retry {run}" in failed.err
    again = comfyfleet("graph", "retry", run, "--watch", environ=customer)
    assert again.code == 3, again.err
    assert "Start a worker that can run it" in again.err
    watched = comfyfleet("graph", "show", run, "--watch", environ=customer)
    assert watched.code == 3, watched.err
    assert comfyfleet("graph", "show", run, environ=customer).code == 0
    shown = comfyfleet("graph", "show", run, "--json", environ=customer).json
    assert shown["error"]["code"] == "no_backend"


def test_a_paused_graph_run_ends_a_wait(idle: Shop) -> None:
    customer = idle.customer(0)
    idle.admin("fleets", "set", "default", "--starts-within", "600")
    try:
        run = comfyfleet("graph", "run", idle.file(GRAPH, "nowhere"), environ=customer).out.strip()
        paused = comfyfleet("graph", "pause", run, environ=customer)
        assert (paused.code, "One: paused, " in paused.err) == (0, True), paused.err
        assert "One: paused, " in comfyfleet("graph", "show", run, environ=customer).out
        assert " paused " in comfyfleet("graph", "runs", environ=customer).out
        waiting = comfyfleet("graph", "show", run, "--watch", environ=customer)
        assert waiting.code == 3, waiting.err
        assert f"comfyfleet graph resume {run}" in waiting.err
        assert comfyfleet("graph", "resume", run, environ=customer).code == 0
        assert " paused " not in comfyfleet("graph", "runs", environ=customer).out
        assert comfyfleet("graph", "cancel", run, environ=customer).code == 0
    finally:
        idle.admin("fleets", "set", "default", "--starts-within", "0")


def test_an_operators_job_that_no_worker_can_run_ends_a_wait(idle: Shop) -> None:
    done = comfyfleet("admin", "submit", "nowhere", "--wait", environ=idle.operator)
    assert done.code == 3, done.err
    assert "Start a worker that can run it" in done.err


def test_an_operators_job_of_a_withdrawn_workflow_ends_with_the_required_action(
    shop: Shop,
) -> None:
    shop.admin("workflows", "register", "over", NEGATIVE, "--price", "0")
    shop.admin("workflows", "deactivate", "over")
    done = comfyfleet("admin", "submit", "over", "--wait", environ=shop.operator)
    assert done.code == 3, done.err
    assert "Ask the operator to offer the workflow again" in done.err


def test_a_job_that_no_worker_can_run_ends_a_wait(idle: Shop) -> None:
    customer = idle.customer(0)
    done = comfyfleet("pipeline", "run", idle.file(PIPELINE, "nowhere"), "--wait", environ=customer)
    assert done.code == 3, done.err
    assert "no backend can run nowhere" in done.err
    assert "Start a worker that can run it" in done.err
    graph = comfyfleet("graph", "run", idle.file(GRAPH, "nowhere"), "--watch", environ=customer)
    assert graph.code == 3, graph.err
    assert "Start a worker that can run it" in graph.err


def test_a_fleet_whose_machines_start_on_demand_has_its_own_time(idle: Shop) -> None:
    customer = idle.customer(0)
    idle.admin("fleets", "set", "default", "--starts-within", "600")
    try:
        shown = idle.admin("fleets", "show", "default", "--json").json
        assert shown["starts_within_seconds"] == 600
        run = comfyfleet("pipeline", "run", idle.file(PIPELINE, "nowhere"), environ=customer)
        headers = {"Authorization": f"Bearer {customer['COMFYFLEET_KEY']}"}
        address = f"{idle.url}/api/pipeline-runs/{run.out.strip()}"
        while not (found := httpx.get(address, headers=headers).json())["trouble"]:
            pass
        assert found["trouble_seconds"] == 600
        job = idle.admin("submit", "nowhere").out.strip()
        assert idle.admin("jobs", "show", job, "--json").json["person_needed_after"] == 600
    finally:
        idle.admin("fleets", "set", "default", "--starts-within", "0")
    assert idle.admin("fleets", "show", "default", "--json").json["starts_within_seconds"] is None


def test_an_open_question_ends_a_wait_in_a_log(shop: Shop) -> None:
    customer = shop.customer(100)
    judged = comfyfleet("pipeline", "run", shop.file(JUDGED), "--wait", environ=customer)
    assert judged.code == 3, judged.err
    assert "1 candidate waits for your judgment" in judged.err
    asking = comfyfleet("graph", "run", shop.file(ASKING), "--watch", environ=customer)
    assert asking.code == 3, asking.err
    assert "Is it good?" in asking.err
    assert "comfyfleet graph answer" in asking.err


class Waiting:
    """A command on a terminal, which runs until the thing that it waits for ends."""

    def __init__(self, customer: dict[str, str], *words: str) -> None:
        self._shown, self._codes = io.StringIO(), list[int]()
        context = CliContext(
            stdin=io.BytesIO(),
            stdout=io.BytesIO(),
            out=Console(file=io.StringIO()),
            err=Console(file=self._shown, width=250, force_terminal=True, color_system=None),
            environ=customer,
            now=lambda: NOW,
        )
        self._thread = threading.Thread(
            target=lambda: self._codes.append(run_command(words, context))
        )
        self._thread.start()

    def shows(self, text: str) -> None:
        while text not in self._shown.getvalue():
            assert self._thread.is_alive(), self._shown.getvalue()

    def code(self) -> int:
        self._thread.join(60)
        (code,) = self._codes
        return code


def test_an_open_question_is_shown_on_a_terminal_and_waited_for(shop: Shop) -> None:
    customer = shop.customer(100)
    run = comfyfleet("pipeline", "run", shop.file(JUDGED), environ=customer).out.strip()
    waiting = Waiting(customer, "pipeline", "status", run, "--follow")
    waiting.shows("waits for your judgment")
    assert comfyfleet("pipeline", "cancel", run, environ=customer).code == 0
    assert waiting.code() == 0


def test_a_question_of_a_graph_is_shown_on_a_terminal_and_waited_for(shop: Shop) -> None:
    customer = shop.customer(100)
    run = comfyfleet("graph", "run", shop.file(ASKING), environ=customer).out.strip()
    waiting = Waiting(customer, "graph", "show", run, "--watch")
    waiting.shows(f"answer with: comfyfleet graph answer {run}")
    answered = comfyfleet("graph", "answer", run, "approve", environ=customer)
    assert answered.code == 0, answered.err
    assert waiting.code() == 0
