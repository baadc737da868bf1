"""`comfyfleet effects`, `jobs`, `wallet` and `webhooks` against a control plane that runs."""

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from tests.support.server.commands import EXAMPLES, Result, comfyfleet
from tests.support.server.local_server import PHOTO, LocalServer, local_server_in
from tests.support.server.small_http import Answer, SmallServer, serving

HOOK, BROKEN_HOOK = "/hook", "/broken"


@pytest.fixture(scope="module")
def receiver() -> Iterator[SmallServer]:
    answers = {HOOK: Answer(b"{}"), BROKEN_HOOK: Answer(b"{}", status=500)}
    with serving(answers, "POST") as receiver:
        yield receiver


@pytest.fixture(scope="module")
def local_server(
    tmp_path_factory: pytest.TempPathFactory, receiver: SmallServer
) -> Iterator[LocalServer]:
    settings = {
        "COMFYFLEET_NO_BACKEND_SECONDS": "1",
        "COMFYFLEET_WEBHOOK_PRIVATE_HOSTS": receiver.url.removeprefix("http://"),
    }
    with local_server_in(tmp_path_factory.mktemp("shop"), **settings) as local_server:
        yield local_server


class Customer:
    def __init__(self, local_server: LocalServer) -> None:
        key = local_server.customer()
        self.environ = {"COMFYFLEET_URL": local_server.url, "COMFYFLEET_KEY": key}

    def says(self, *arguments: str, code: int = 0) -> Result:
        done = comfyfleet(*arguments, environ=self.environ, width=200)
        assert done.code == code, done.out + done.err
        return done

    def balance(self) -> Any:
        return self.says("wallet", "--json").json["balance"]


@pytest.fixture
def ada(local_server: LocalServer) -> Customer:
    return Customer(local_server)


def test_a_photo_goes_through_an_effect_and_its_result_is_saved(
    tmp_path: Path, ada: Customer
) -> None:
    assert "soften" in ada.says("effects", "list").out
    assert "radius" in ada.says("effects", "show", "soften").out
    done = ada.says(
        "effects", "run", "soften", str(PHOTO), "--set", "radius=2", "-o", str(tmp_path)
    )
    saved, *_ = (Path(line) for line in done.out.splitlines())
    assert saved.parent == tmp_path
    assert saved.name.startswith(f"{PHOTO.stem}-soften")
    assert saved.stat().st_size
    assert ada.balance() == 997
    (job,) = ada.says("jobs", "list", "--json").json["jobs"]
    assert (job["status"], job["price_tokens"]) == ("completed", 3)
    shown = ada.says("jobs", "show", job["id"]).out
    assert saved.name in shown
    assert "soften" in shown.split("\n")[1]
    assert " soften " in ada.says("jobs", "list").out


def test_an_unknown_property_is_answered_with_those_that_can_be_set(ada: Customer) -> None:
    refused = ada.says("effects", "run", "soften", str(PHOTO), "--set", "nope=1", code=1)
    assert refused.lines[-1].startswith(
        "error: unknown property 'nope'; available properties: radius"
    )
    assert "input" not in refused.lines[-1]
    missing = ada.says("effects", "run", "soften", "--set", "nope=1", code=1)
    assert "unknown property 'nope'" in missing.lines[-1]


def test_a_failed_job_ends_the_wait_with_1(ada: Customer) -> None:
    failed = ada.says("effects", "run", "failing", "--wait", code=1)
    assert failed.lines[-1].startswith("error: job ")
    assert "failed" in failed.lines[-1]
    assert ada.balance() == 1_000


def test_a_job_is_cancelled_and_refunded(ada: Customer) -> None:
    job_id = ada.says("effects", "run", "slow", "--set", "steps=600").out.strip()
    assert ada.balance() == 999
    assert "is cancelled" in ada.says("jobs", "cancel", job_id).err
    assert ada.balance() == 1_000
    assert "cancelled" in ada.says("jobs", "wait", job_id, code=1).lines[-1]


def test_a_wait_that_only_a_person_can_end_exits_with_3(
    local_server: LocalServer, ada: Customer
) -> None:
    slug = f"lost-{uuid4().hex[:8]}"
    document = {
        "1": {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
    }
    needs = {"required_capabilities": ["no-machine-has-this"], "price_tokens": 0}
    local_server.admin("/workflows", slug=slug, document=document, properties=[], **needs)
    local_server.admin(
        "/effects", slug=slug, workflow_slug=slug, price_tokens=1, overrides={}, published=True
    )
    job_id = ada.says("effects", "run", slug).out.strip()
    waited = ada.says("jobs", "wait", job_id, code=3)
    assert "Start a worker" in waited.err
    assert f"comfyfleet jobs cancel {job_id}" in waited.lines[-1]


def test_mistakes_are_found_before_anything_is_uploaded(tmp_path: Path, ada: Customer) -> None:
    missing = str(tmp_path / "nothing.png")
    assert missing in ada.says("effects", "run", "soften", missing, code=1).err
    assert missing in ada.says("effects", "run", "soften", "--set", f"a=@{missing}", code=1).err
    assert "NAME=VALUE" in ada.says("effects", "run", "soften", "--set", "radius", code=1).err
    assert ada.says("jobs", "list").lines == ["there are no matching jobs"]


def test_a_test_message_is_sent_to_a_webhook(receiver: SmallServer, ada: Customer) -> None:
    ids = dict[str, str]()
    for path in (HOOK, BROKEN_HOOK):
        made = httpx.post(
            f"{ada.environ['COMFYFLEET_URL']}/api/webhooks",
            json={"url": f"{receiver.url}{path}"},
            headers={"Authorization": f"Bearer {ada.environ['COMFYFLEET_KEY']}"},
        )
        assert made.status_code == 201, made.text
        ids[path] = made.json()["id"]
    listed = ada.says("webhooks", "list", "--json").json["webhooks"]
    assert {row["id"] for row in listed} == {*ids.values()}
    assert not any("secret" in row for row in listed)
    assert "the receiver responded with 200" in ada.says("webhooks", "test", ids[HOOK]).err
    assert (
        "the receiver responded with 500"
        in ada.says("webhooks", "test", ids[BROKEN_HOOK], code=1).err
    )
    assert receiver.asked == {HOOK: 1, BROKEN_HOOK: 1}, "neither is repeated"


def test_the_sign_up_example_makes_a_customer_who_can_pay(
    local_server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMFYFLEET_URL", local_server.url)
    monkeypatch.setenv("COMFYFLEET_KEY", local_server.admin_key)
    example = runpy.run_path(str(EXAMPLES / "sign_up.py"))
    with example["control_plane"]() as plane:
        customer = example["sign_up"](plane, "Ada's films", "ada@example.com")
        wallet = (customer["tenant_id"], customer["user_id"])
        assert [example["credit"](plane, *wallet, 500, "of-the-example") for _ in range(2)] == [
            500,
            500,
        ]
        key = example["read_only_key"](plane, *wallet)
    environ = {"COMFYFLEET_URL": local_server.url, "COMFYFLEET_KEY": key}
    assert comfyfleet("wallet", "--json", environ=environ).json["balance"] == 500
    assert comfyfleet("effects", "run", "words", environ=environ).code == 1


def test_the_sign_up_example_shows_the_key_and_the_reason_when_a_credit_is_refused(
    local_server: LocalServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = local_server.admin("/operators", name="shop", role="operator")
    monkeypatch.setenv("COMFYFLEET_URL", local_server.url)
    monkeypatch.setenv("COMFYFLEET_KEY", operator["key"])
    with pytest.raises(SystemExit, match=r"403.*requires the role owner"):
        runpy.run_path(str(EXAMPLES / "sign_up.py"), run_name="__main__")
    assert "key cf_" in capsys.readouterr().out
