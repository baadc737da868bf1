"""Overview, workers and fleets: joined, approved, drained, rotated and revoked, and who can run what.

Workers of the fleet `studio` are moved by hand: each test says what they tell, and when.
"""

import base64
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from tests.support.server.commands import EXAMPLES
from tests.support.server.customers import png
from tests.support.server.web import WAIT_MS_MAX, WebPage, WebServer, open_page

GIGABYTE = 1024**3
WAIT_SECONDS = WAIT_MS_MAX / 1000
CAPABILITY = "studio"
GPU = "NVIDIA GeForce RTX 4090"
PREVIEW = {
    "node_id": "3",
    "content_type": "image/png",
    "base64": base64.b64encode(png(64, 120)).decode(),
}
READING = {
    "gpu_load_percent": 91.0,
    "gpu_memory_used_bytes": 17 * GIGABYTE,
    "gpu_memory_total_bytes": 24 * GIGABYTE,
    "gpu_temperature_celsius": 64.0,
    "cpu_percent": 30.0,
    "comfyui_restarts": 3,
}


@dataclass
class HandWorker:
    """Tells what a worker would tell."""

    url: str
    name: str
    key: str

    def call(self, endpoint: str, **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.key}"}
        address = f"{self.url}/api/worker/{endpoint}"
        return httpx.post(address, json=body, headers=headers, timeout=WAIT_SECONDS)

    def poll(self, **body: Any) -> httpx.Response:
        told = {"worker_id": self.name, "capabilities": [CAPABILITY], "reading": READING}
        return self.call("poll", **told, **body)

    def take(self) -> dict[str, Any]:
        answer = self.poll(wait_seconds=20).json()
        assert answer["job"], answer["reason"]
        job: dict[str, Any] = answer["job"]
        return {name: job[name] for name in ("dispatch_id", "lease_token")}


@dataclass(frozen=True)
class Studio:
    """A fleet whose workers wait for approval, and a workflow that only they can run."""

    web: WebServer
    secret: str
    node_types: list[str]

    def get(self, path: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.web.operator_key}"}
        response = httpx.get(f"{self.web.url}/api/admin{path}", headers=headers)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def offer(self, workflow: str, price_tokens: int | None) -> None:
        """Offers a workflow at a price, or withdraws it."""
        terms = {"is_withdrawn": True} if price_tokens is None else {"price_tokens": price_tokens}
        headers = {"Authorization": f"Bearer {self.web.operator_key}"}
        path = f"{self.web.url}/api/admin/workflows/{workflow}"
        response = httpx.patch(path, json=terms, headers=headers)
        assert response.status_code == 200, response.text

    def state(self, worker: str) -> str:
        return str(self.get(f"/workers/{worker}")["state"])

    def join(
        self, name: str, *, secret: str = "", node_types: list[str] | None = None
    ) -> HandWorker:
        backend = {
            "kind": "ComfyUI",
            "version": "0.9",
            "gpu": GPU,
            "gpu_memory_bytes": 24 * GIGABYTE,
            "node_types": self.node_types if node_types is None else node_types,
            "model_files": {"checkpoints": ["lamp.safetensors"]},
        }
        body = {
            "worker_id": name,
            "fleet_slug": CAPABILITY,
            "capabilities": [CAPABILITY],
            "backend": backend,
        }
        headers = {"X-Fleet-Secret": secret or self.secret}
        answer = httpx.post(f"{self.web.url}/api/worker/register", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return HandWorker(self.web.url, name, answer.json()["token"])

    def approved(self, name: str, **given: Any) -> HandWorker:
        worker = self.join(name, **given)
        self.web.admin(f"/workers/{name}/approve")
        # More at once than it had said: that is written at once, and the rest with it.
        told = worker.poll(models_loaded=["lamp.safetensors"], max_concurrency=2)
        assert told.status_code == 200, told.text
        return worker


@pytest.fixture(scope="module")
def studio(web: WebServer) -> Studio:
    made = web.admin("/fleets", slug=CAPABILITY, approval="manual", max_workers=20)
    document = json.loads((EXAMPLES / "workflows" / "negative.json").read_text())
    web.admin("/workflows", slug="moonrise", document=document, required_capabilities=[CAPABILITY])
    headers = {"Authorization": f"Bearer {web.operator_key}"}
    path = f"{web.url}/api/admin/fleets/{CAPABILITY}/production/workflows"
    put = httpx.put(path, json={"workflow_slugs": ["moonrise"]}, headers=headers)
    assert put.status_code == 200, put.text
    studio = Studio(web, made["secret"], [])
    own = next(
        each["worker_id"]
        for each in studio.get("/workers")["workers"]
        if not each["fleet"].startswith(CAPABILITY)
    )
    studio.node_types.extend(studio.get(f"/workers/{own}")["backend"]["node_types"])
    return studio


@pytest.fixture(scope="module")
def tab(browser: Browser, web: WebServer) -> Iterator[WebPage]:
    with open_page(browser, web.url) as page:
        page.sign_in(web.operator_key, "/console")
        yield page


def row(page: Page, worker: str) -> Locator:
    return page.get_by_role("listitem", name=worker, exact=True)


def told(page: Page, text: str) -> Locator:
    return page.locator(".toast").filter(has_text=text)


def test_a_fleet_is_made_and_its_secret_is_shown_once(tab: WebPage, studio: Studio) -> None:
    page = tab.page
    tab.open("/console/fleets")
    page.get_by_role("button", name="New fleet").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Create fleet").click()
    expect(dialog.get_by_text("start with a letter or digit").first).to_be_visible()
    dialog.get_by_label("Name").fill("night")
    dialog.get_by_role("radio", name="After approval").check()
    dialog.get_by_role("button", name="Create fleet").click()
    shown = page.get_by_label("Fleet secret")
    secret = shown.inner_text().strip()
    commands = page.get_by_label("Commands to add a worker").inner_text()
    assert f"COMFYFLEET_FLEET_SECRET={secret}" in commands
    assert f"--control {studio.web.url} --fleet night" in commands
    tab.screenshot("fleet secret")
    assert tab.serious_findings() == []
    done = page.get_by_role("button", name="Done")
    expect(done).to_have_attribute("aria-disabled", "true")
    page.keyboard.press("Escape")
    expect(shown).to_be_visible()
    page.get_by_label("I have stored it").check()
    done.click()
    expect(shown).to_be_hidden()
    night = page.get_by_role("region", name="night/production")
    expect(night).to_contain_text("New workers wait for approval")
    night.get_by_text("Join commands and model switching").click()
    expect(night.get_by_label("Commands to add a worker")).to_contain_text("SECRET=SECRET")
    assert secret not in page.content()
    tab.screenshot("fleets desktop")
    # What was shown is the secret.
    body = {"worker_id": "night-1", "fleet_slug": "night"}
    headers = {"X-Fleet-Secret": secret}
    joined = httpx.post(f"{studio.web.url}/api/worker/register", json=body, headers=headers)
    assert joined.status_code == 200, joined.text


def test_a_new_secret_ends_the_old_one(tab: WebPage, studio: Studio) -> None:
    page = tab.page
    tab.open("/console/fleets")
    night = page.get_by_role("region", name="night/production")
    night.get_by_role("button", name="New secret").click()
    page.get_by_role("button", name="Create secret").click()
    secret = page.get_by_label("Fleet secret").inner_text().strip()
    page.get_by_label("I have stored it").check()
    page.get_by_role("button", name="Done").click()
    assert secret not in page.content()
    address = f"{studio.web.url}/api/worker/register"
    body = {"worker_id": "night-2", "fleet_slug": "night"}
    answer = httpx.post(address, json=body, headers={"X-Fleet-Secret": secret})
    assert answer.status_code == 200, answer.text


def test_a_fleet_is_opened_for_prompts_on_terms(tab: WebPage, studio: Studio) -> None:
    page, path = tab.page, "/fleets/studio/production/prompts"
    before = studio.get(path)
    assert not before["is_open"]
    tab.open("/console/fleets")
    fleet = page.get_by_role("region", name="studio/production")
    fleet.get_by_role("button", name="Prompts").click()
    page.get_by_role("checkbox", name="Run prompts from ComfyUI clients").check()
    page.get_by_role("radio", name="Per second").check()
    page.get_by_label("Tokens per GPU second").fill("0")
    page.get_by_label("Allowed node types").fill("VHS_*")
    page.get_by_label("Routes forwarded").fill("/api/../etn")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("A number above 0")).to_be_visible()
    expect(page.get_by_text("Paths of letters, digits")).to_be_visible()
    assert studio.get(path) == before
    tab.screenshot("fleet prompts")
    assert tab.serious_findings() == []
    page.get_by_label("Tokens per GPU second").fill("0.5")
    page.get_by_label("Routes forwarded").fill("/api/etn")
    page.get_by_label("Max. nodes per prompt").fill("500")
    page.get_by_role("button", name="Save").click()
    expect(told(page, "Prompt policy saved")).to_be_visible()
    wanted = {"is_open": True, "price_per_second": 0.5, "nodes_max": 500}
    assert studio.get(path) == {
        **before,
        **wanted,
        "allow": ["VHS_*"],
        "passthrough": ["/api/etn"],
    }
    fleet.get_by_role("button", name="Prompts").click()
    page.get_by_role("checkbox", name="Run prompts from ComfyUI clients").uncheck()
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert studio.get(path)["is_open"] is False


def test_a_fleet_opened_below_the_price_of_its_workflow_is_warned_of(
    tab: WebPage, studio: Studio
) -> None:
    page, path = tab.page, "/fleets/studio/production/prompts"
    studio.offer("moonrise", 7)
    tab.open("/console/fleets")
    fleet = page.get_by_role("region", name="studio/production")
    fleet.get_by_role("button", name="Prompts").click()
    dialog = page.get_by_role("dialog")
    page.get_by_role("checkbox", name="Run prompts from ComfyUI clients").check()
    page.get_by_role("radio", name="Per prompt").check()
    page.get_by_label("Tokens per prompt").fill("6")
    page.get_by_role("button", name="Save").click()
    warning = dialog.get_by_role("alert")
    expect(warning).to_contain_text("less than the workflow moonrise (7 tokens)")
    assert studio.get(path)["price_tokens"] == 6
    page.get_by_label("Tokens per prompt").fill("7")
    page.get_by_role("button", name="Save").click()
    expect(dialog).to_have_count(0)
    fleet.get_by_role("button", name="Prompts").click()
    expect(warning).to_have_count(0)
    page.get_by_role("checkbox", name="Run prompts from ComfyUI clients").uncheck()
    page.get_by_role("button", name="Save").click()
    expect(dialog).to_have_count(0)
    studio.offer("moonrise", None)


def test_a_worker_that_joins_comes_by_itself_and_is_approved(tab: WebPage, studio: Studio) -> None:
    page = tab.page
    tab.open("/console/workers")
    page.get_by_role("button", name="Add worker").first.click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Fleet").select_option("studio/production")
    expect(dialog.get_by_label("Commands to add a worker")).to_contain_text("--fleet studio")
    expect(dialog.get_by_role("note")).to_contain_text("can be reached from this machine only")
    expect(dialog.get_by_role("note")).to_contain_text("COMFYFLEET_PUBLIC_URL")
    page.keyboard.press("Escape")
    studio.join("gpu-1")
    waits = row(page, "gpu-1")
    expect(waits).to_contain_text("Needs approval")
    expect(waits).to_contain_text("RTX 4090")
    rail = page.get_by_role("navigation", name="Console").get_by_role("link", name="Workers")
    expect(rail.locator(".badge-need")).to_be_visible()
    tab.screenshot("worker needs approval")
    waits.get_by_role("button", name="Approve").click()
    expect(waits).to_contain_text("Idle")
    assert studio.state("gpu-1") == "online"


def test_a_worker_is_drained_and_taken_back(tab: WebPage, studio: Studio) -> None:
    page = tab.page
    worker = studio.approved("gpu-2")
    others = [each["worker_id"] for each in studio.get("/workers")["workers"]]
    for other in others:
        if other != "gpu-2":
            studio.web.admin(f"/workers/{other}/drain")
    tab.open("/console/workers")
    mine = row(page, "gpu-2")
    expect(mine).to_contain_text("17 / 24 GB")
    expect(mine).to_contain_text("64 °C")
    expect(mine).to_contain_text("lamp")
    mine.get_by_role("button", name="Drain").click()
    expect(mine).to_contain_text("Draining")
    assert worker.poll().json()["drain"]
    fleet = page.get_by_role("region", name="studio/production")
    expect(fleet).to_contain_text(re.compile("(is|are) draining and no other worker is online"))
    expect(fleet).not_to_contain_text("no worker online")
    (job,) = studio.web.admin("/jobs", workflow_slug="moonrise")["ids"]
    expect(fleet).to_contain_text("1 job waiting")
    studio.web.admin("/jobs/bulk", act="cancel", ids=[job])
    expect(fleet).to_contain_text("no jobs waiting")
    told(page, "gpu-2 is draining").get_by_role("button", name="Undo").click()
    expect(mine).to_contain_text("Idle")
    assert not worker.poll().json()["drain"]
    mine.get_by_role("button", name="Drain").click()
    mine.get_by_role("button", name="Resume").click()
    expect(mine).to_contain_text("Idle")
    assert studio.state("gpu-2") == "online"
    for other in others:
        studio.web.admin(f"/workers/{other}/undrain")


def test_a_new_key_is_shown_once_and_the_old_one_is_dead(tab: WebPage, studio: Studio) -> None:
    page = tab.page
    worker = studio.approved("gpu-3")
    tab.open("/console/workers?view=all")
    row(page, "gpu-3").get_by_role("button", name="More actions for gpu-3").click()
    page.get_by_role("menuitem", name="New key").click()
    page.get_by_role("radio", name="Revoke immediately").check()
    page.get_by_role("button", name="Create key").click()
    expect(page.get_by_role("dialog")).to_contain_text("The old key no longer works")
    key = page.get_by_label("Worker key").inner_text().strip()
    assert worker.poll().status_code == 401
    assert HandWorker(worker.url, "gpu-3", key).poll().status_code == 200
    page.get_by_label("I have stored it").check()
    page.get_by_role("button", name="Done").click()
    assert key not in page.content()


def test_a_worker_is_revoked_after_a_question_and_let_in_again(
    tab: WebPage, studio: Studio
) -> None:
    page = tab.page
    worker = studio.approved("gpu-4")
    tab.open("/console/workers/gpu-4")
    expect(page.get_by_role("heading", name="gpu-4")).to_be_visible()
    expect(page.get_by_label("Facts")).to_contain_text(GPU)
    expect(page.get_by_label("Facts")).to_contain_text("ComfyUI restarts to free memory3")
    tab.screenshot("worker desktop")
    assert tab.serious_findings() == []
    for answer in ("Keep it", "Revoke worker"):
        page.get_by_role("button", name="More actions for gpu-4").click()
        page.get_by_role("menuitem", name="Revoke").click()
        page.get_by_role("button", name=answer).click()
        expect(page.get_by_role("dialog")).to_be_hidden()
        if answer == "Keep it":
            assert worker.poll().status_code == 200
    expect(page.locator(".pill")).to_have_text("Revoked")
    assert worker.poll().status_code == 401
    page.get_by_role("button", name="Re-admit").click()
    page.get_by_role("button", name="Re-admit worker").click()
    expect(told(page, "gpu-4 is approved")).to_be_visible()
    assert studio.get("/workers/gpu-4")["is_approved"]


def test_keys_alone_are_enough(tab: WebPage, studio: Studio) -> None:
    page = tab.page
    studio.approved("gpu-10")
    tab.open("/console/workers")
    mine = row(page, "gpu-10")
    more = mine.get_by_role("button", name="More actions for gpu-10")
    more.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("menuitem", name="View jobs")).to_be_focused()
    for key in ("ArrowDown", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    expect(page.get_by_role("dialog", name="Revoke gpu-10?")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    more.focus()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(mine).to_contain_text("Draining")
    assert studio.state("gpu-10") == "draining"


def test_who_can_run_what_and_what_is_missing_where(tab: WebPage, studio: Studio) -> None:
    page = tab.page
    studio.approved("gpu-5")
    studio.approved("gpu-6", node_types=["LoadImage"])
    tab.open("/console/workers?view=matrix")
    table = page.get_by_role("region", name="Compatibility matrix")
    names = table.get_by_role("columnheader").all_inner_texts()
    cells = table.get_by_role("row", name=re.compile("^moonrise")).get_by_role("cell")
    by_worker = dict(
        zip([each.split()[0] for each in names[1:]], cells.all_inner_texts(), strict=True)
    )
    assert by_worker["gpu-5"] == "can run it"
    assert by_worker["gpu-6"].startswith("missing ")
    assert "EmptyImage" in by_worker["gpu-6"]
    missing = page.get_by_role("listitem").filter(has_text="EmptyImage").first
    expect(missing).to_contain_text("missing on gpu-6")
    tab.screenshot("matrix desktop")
    tab.open("/console/workers")
    fleet = page.get_by_role("region", name="studio/production")
    expect(fleet.get_by_role("link", name=re.compile("moonrise"))).to_contain_text(
        "gpu-6 is missing"
    )


def test_the_overview_shows_a_run_as_it_goes_on(tab: WebPage, studio: Studio) -> None:
    page = tab.page
    worker = studio.approved("gpu-7")
    for name in ("gpu-1", "gpu-2", "gpu-3", "gpu-5", "gpu-6"):
        if any(each["worker_id"] == name for each in studio.get("/workers")["workers"]):
            studio.web.admin(f"/workers/{name}/drain")
    tab.open("/console")
    tile = page.get_by_role("listitem", name=re.compile("^gpu-7: "))
    expect(tile).to_contain_text("idle")
    studio.web.admin("/jobs", workflow_slug="moonrise")
    job = worker.take()
    for percent in (20.0, 62.0):
        progress = {"percent": percent, "node": "KSampler"}
        assert worker.call("heartbeat", **job, started=True, progress=progress).status_code == 200
        expect(tile).to_contain_text(f"{percent:.0f}%")
    expect(tile).to_contain_text("moonrise")
    expect(tile).to_contain_text("node KSampler")
    show_preview(page, tile, worker, job)
    flows = page.get_by_role("row", name=re.compile("^moonrise"))
    expect(flows.get_by_role("cell").nth(1)).to_have_text("1")
    expect(
        flows.get_by_role("img", name=re.compile("jobs of moonrise")).locator("canvas")
    ).to_be_visible()
    for title in ("Wait p95", "Run p95"):
        expect(page.get_by_role("columnheader", name=title)).to_be_visible()
    for title in (
        "Queue depth",
        "Finished",
        "Wait time",
        "Run time",
        "Succeeded",
        "Utilization",
        "Tokens",
    ):
        expect(page.get_by_role("region", name=title, exact=True).locator("canvas")).to_be_visible()
    tab.screenshot("overview desktop")
    tile.get_by_role("link").first.click()
    expect(page).to_have_url(re.compile("/console/jobs/"))
    note = page.get_by_role("note").filter(has_text="Worker gpu-7 is running the job")
    expect(note).to_contain_text("Current status")
    failed = worker.call("fail", **job, error="out of paint")
    assert failed.status_code == 200, failed.text


def show_preview(page: Page, tile: Locator, worker: HandWorker, job: dict[str, Any]) -> None:
    """Pictures come only while somebody looks."""
    answer = worker.call("heartbeat", **job, preview=PREVIEW).json()
    assert not answer["previews"]
    page.get_by_role("button", name="Show previews").click()
    picture = tile.get_by_role("img", name="Live preview of gpu-7")
    deadline = time.monotonic() + WAIT_SECONDS
    while picture.count() == 0:
        assert time.monotonic() < deadline, "no preview is shown"
        worker.call("heartbeat", **job, preview=PREVIEW)
        page.wait_for_timeout(50)
    expect(picture).to_be_visible()
    page.get_by_role("button", name="Hide previews").click()
    expect(picture).to_have_count(0)
    page.get_by_role("button", name="Show previews").click()


def test_the_overview_says_what_needs_a_person(tab: WebPage, studio: Studio) -> None:
    page = tab.page
    studio.join("gpu-8")
    tab.open("/console")
    page.get_by_role("radio", name="7 d").check()
    expect(page).to_have_url(re.compile(r"\?range=7d$"))
    look = page.get_by_role("listitem").filter(has_text="Waiting for approval:")
    expect(look).to_contain_text("Approve the worker if you know it")
    tab.screenshot("overview needs attention")
    tile = page.get_by_role("listitem", name=re.compile("^gpu-8: "))
    tile.get_by_role("button", name="Approve").click()
    expect(told(page, "gpu-8 is approved")).to_be_visible()
    assert studio.state("gpu-8") == "online"


def test_who_may_only_look_is_told_so(browser: Browser, studio: Studio) -> None:
    made = studio.web.admin("/operators", name="guest", role="viewer")
    studio.approved("gpu-9")
    with open_page(browser, studio.web.url, phone=True, theme="light") as guest:
        guest.sign_in(made["key"], "/console/workers")
        guest.expect_problem("403")
        mine = row(guest.page, "gpu-9")
        guest.screenshot("workers phone")
        mine.get_by_role("button", name="Drain").click()
        expect(guest.page.locator(".toast")).to_contain_text(re.compile("operator|role|may", re.I))
        expect(mine).to_contain_text("Idle")
        assert guest.pixels_too_wide() <= 0
        guest.open("/console")
        guest.screenshot("overview phone")
        assert guest.pixels_too_wide() <= 0


def test_a_worker_that_is_gone_is_told_with_a_way_on(tab: WebPage, studio: Studio) -> None:
    tab.expect_problem("404")
    tab.open("/console/workers/nobody")
    tab.page.get_by_role("link", name="View all workers").click()
    expect(tab.page.get_by_role("heading", name="Workers", exact=True)).to_be_visible()
