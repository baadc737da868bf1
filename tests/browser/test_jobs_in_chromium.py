"""Jobs and the queue as operators see them: filtered, retried, cancelled, looked at, replayed; by keyboard alone."""

import re
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from tests.support.server.browser import EditorPage
from tests.support.server.web import WAIT_MS_MAX, WebPage, WebServer, open_page

LOOK_SECONDS = 0.05
HEAD = b"IHDR" + struct.pack(">IIBBBBB", 64, 64, 8, 2, 0, 0, 0)
# Its head says what it is; the rest is missing.
HALF_PICTURE = (
    b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + HEAD + struct.pack(">I", zlib.crc32(HEAD))
)
ENDED = ("completed", "failed", "cancelled")


@dataclass(frozen=True)
class JobServer:
    """Jobs of several states: `soften` fails with half a picture, `negative` has completed and is paused."""

    web: WebServer
    failed: Sequence[str]
    completed: str

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.web.operator_key}"}
        response = httpx.get(f"{self.web.url}/api/admin{path}", params=query, headers=headers)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def jobs(self, **query: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/jobs", **query)["jobs"]
        return found

    def status(self, job_id: str) -> str:
        """Without a look at its files, which would be in the audit."""
        return str(self.get(f"/jobs/{job_id}/details", files=False)["status"])

    def wait_for(self, job_id: str) -> str:
        deadline = time.monotonic() + WAIT_MS_MAX / 1000
        while (status := self.status(job_id)) not in ENDED:
            assert time.monotonic() < deadline, f"{job_id} is still {status}"
            time.sleep(LOOK_SECONDS)
        return status


def upload(web: WebServer, content: bytes) -> str:
    told = web.admin("/uploads", filename="a.png", content_type="image/png", size=len(content))
    slot = told["upload"]
    done = httpx.request(slot["method"], slot["url"], headers=slot["headers"], content=content)
    assert done.status_code < 300, done.text
    return str(told["file_id"])


@pytest.fixture(scope="module")
def jobs(web: WebServer) -> JobServer:
    broken = upload(web, HALF_PICTURE)
    failed = [
        web.admin("/jobs", workflow_slug="soften", files={"input": broken})["ids"][0]
        for _ in range(3)
    ]
    (completed,) = web.admin(
        "/jobs", workflow_slug="negative", properties={"width": 32, "height": 32}
    )["ids"]
    made = JobServer(web, failed, completed)
    assert {made.wait_for(each) for each in failed} == {"failed"}
    assert made.wait_for(completed) == "completed"
    web.admin("/workflows/negative/pause")
    return made


@pytest.fixture(scope="module")
def tab(browser: Browser, web: WebServer) -> Iterator[WebPage]:
    expect.set_options(timeout=WAIT_MS_MAX)
    with open_page(browser, web.url) as page:
        page.sign_in(web.operator_key, "/console")
        yield page


def rows(page: Page) -> Locator:
    return page.get_by_role("grid").locator(".table-row")


def test_a_filter_becomes_chips_and_the_address_and_failed_jobs_are_retried_at_once(
    tab: WebPage, jobs: JobServer
) -> None:
    page = tab.page
    tab.open("/console/jobs")
    expect(rows(page)).to_have_count(4)
    tab.screenshot("jobs desktop")
    page.get_by_role("combobox", name="Filter jobs").fill("state:failed workflow:soften")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"\?status=failed&workflow=soften$"))
    expect(rows(page)).to_have_count(3)
    expect(rows(page).first).to_contain_text("Failed")
    page.get_by_label("Select all").check()
    bar = page.get_by_role("region", name="Actions for the selected jobs")
    expect(bar).to_contain_text("3 selected")
    tab.screenshot("jobs selected")
    bar.get_by_role("button", name="Retry").click()
    expect(page.get_by_role("status").filter(has_text="3 jobs retried")).to_be_visible()
    expect(bar).to_be_hidden()
    retried = {each["retry_of"] for each in jobs.jobs(workflow="soften")} - {None}
    assert retried == set(jobs.failed)
    # They fail again, and come into the list by themselves.
    expect(rows(page)).to_have_count(6)
    page.get_by_role("button", name="Remove state failed").click()
    expect(page).to_have_url(re.compile(r"\?workflow=soften$"))
    page.get_by_role("combobox", name="Filter jobs").fill("state:wonderful")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("isn't a valid filter")


def test_a_view_is_kept_with_the_browser(tab: WebPage, jobs: JobServer) -> None:
    page = tab.page
    tab.open("/console/jobs?workflow=negative")
    page.get_by_role("button", name="Save view").click()
    page.get_by_label("View name").fill("Negatives")
    page.keyboard.press("Enter")
    tab.open("/console/jobs")
    page.get_by_role("tab", name="Negatives").click()
    expect(page).to_have_url(re.compile(r"\?workflow=negative$"))
    expect(rows(page)).to_have_count(1)
    page.get_by_role("tab", name=re.compile("Failed in 24 h")).click()
    expect(page).to_have_url(re.compile(r"status=failed&since=24h$"))


def test_nothing_that_fits_is_told_with_a_way_on(tab: WebPage, jobs: JobServer) -> None:
    page = tab.page
    tab.open("/console/jobs?error=no+error+says+this")
    expect(page.get_by_text("No matching jobs")).to_be_visible()
    page.get_by_role("button", name="Clear filters").click()
    expect(rows(page).first).to_be_visible()


def test_waiting_jobs_are_cancelled_after_a_question_and_a_workflow_goes_on(
    tab: WebPage, jobs: JobServer
) -> None:
    page = tab.page
    jobs.web.admin("/jobs", workflow_slug="negative", count=3)
    tab.open("/console/queue")
    expect(rows(page)).to_have_count(3)
    expect(page.get_by_role("region", name="By workflow")).to_contain_text("negative")
    tab.screenshot("queue desktop")
    # One that comes while the page is open.
    jobs.web.admin("/jobs", workflow_slug="negative")
    expect(rows(page)).to_have_count(4)
    for number in (0, 1):
        rows(page).nth(number).get_by_label("Select").check()
    bar = page.get_by_role("region", name="Actions for the selected jobs")
    bar.get_by_role("button", name="Priority").click()
    page.get_by_label("Priority", exact=True).fill("7")
    page.get_by_role("button", name="Set priority").click()
    expect(page.get_by_text("Priority of 2 jobs changed")).to_be_visible()
    assert sorted(each["priority"] for each in jobs.jobs(status="queued")) == [0, 0, 7, 7]
    page.get_by_label("Select all").check()
    bar.get_by_role("button", name="Cancel").click()
    dialog = page.get_by_role("dialog", name="Cancel 4 jobs?")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert len(jobs.jobs(status="queued")) == 4
    bar.get_by_role("button", name="Cancel").click()
    dialog.get_by_role("button", name="Cancel jobs").click()
    expect(page.get_by_text("4 jobs cancelled")).to_be_visible()
    expect(page.get_by_text("The queue is empty")).to_be_visible()
    assert jobs.jobs(status="queued") == []
    page.get_by_role("button", name="Resume negative").click()
    expect(page.get_by_text("negative is resumed")).to_be_visible()
    workflows = jobs.get("/workflows")["workflows"]
    assert not any(each["is_paused"] for each in workflows)
    page.get_by_role("status").get_by_role("button", name="Undo").first.click()
    expect(page.get_by_role("button", name="Resume negative")).to_be_visible()


def test_jobs_are_found_selected_retried_and_opened_by_keys_alone(
    tab: WebPage, jobs: JobServer
) -> None:
    page = tab.page
    tab.open("/console/jobs")
    page.keyboard.press("/")
    page.keyboard.type("state:failed")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    expect(page.get_by_role("grid")).to_be_focused()
    # The list is read anew with a filter: a key moves nothing before its rows are there.
    expect(page).to_have_url(re.compile("status=failed"))
    expect(rows(page).filter(has_not_text="Failed")).to_have_count(0)
    expect(rows(page)).not_to_have_count(0)
    before = rows(page).count()
    page.keyboard.press("j")
    page.keyboard.press("x")
    expect(page.get_by_text("1 selected")).to_be_visible()
    expect(rows(page).nth(1)).to_have_attribute("aria-selected", "true")
    page.keyboard.press("r")
    expect(page.get_by_text("1 job retried").first).to_be_visible()
    expect(rows(page)).to_have_count(before + 1)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
    page.keyboard.press("Escape")
    page.get_by_role("grid").focus()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("/console/jobs/[0-9a-f-]{36}$"))


def test_a_failed_job_shows_its_error_attempts_and_prompt_and_is_replayed(
    tab: WebPage, jobs: JobServer
) -> None:
    page = tab.page
    tab.open(f"/console/jobs/{jobs.failed[0]}")
    expect(page.get_by_role("heading", name="soften")).to_be_visible()
    expect(page.get_by_role("note").first).to_contain_text("failed")
    expect(page.get_by_role("heading", name=re.compile("Attempts"))).to_contain_text(
        "to completion"
    )
    expect(page.get_by_text("Attempt 1", exact=True)).to_be_visible()
    expect(page.get_by_label("Error reported by the backend")).to_contain_text("LoadImage")
    expect(page.locator(".job-history")).to_contain_text("Submitted")
    tab.screenshot("job failed desktop")
    page.get_by_role("tab", name="Prompt").click()
    expect(page.get_by_role("tabpanel")).to_contain_text("class_type")
    page.get_by_role("radio", name="JSON").check()
    expect(page.get_by_label("Prompt", exact=True).last).to_contain_text(
        '"class_type": "LoadImage"'
    )
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as file").click()
    assert saved.value.suggested_filename == f"prompt-{jobs.failed[0]}.json"
    page.get_by_role("button", name="Replay", exact=True).click()
    expect(page.get_by_text("Replayed as a new job")).to_be_visible()
    page.get_by_role("status").get_by_role("button", name="Open job").first.click()
    expect(page).not_to_have_url(re.compile(jobs.failed[0]))
    # It fails as the first did, and the page tells so by itself.
    expect(page.locator(".page-head")).to_contain_text("Failed")


def test_a_job_that_was_retried_leads_to_its_retry(tab: WebPage, jobs: JobServer) -> None:
    page = tab.page
    web, job = jobs.web, jobs.failed[1]
    made = web.admin("/jobs/bulk", act="retry", ids=[job])["retries"][job]
    tab.open(f"/console/jobs/{job}")
    expect(page.get_by_role("button", name="Retry", exact=True)).to_have_count(0)
    page.get_by_role("link", name="Open retry").click()
    expect(page).to_have_url(re.compile(f"/console/jobs/{made}$"))


def test_a_prompt_is_opened_in_the_editor(browser: Browser, jobs: JobServer) -> None:
    with open_page(browser, jobs.web.url) as tab:
        # The picture that the prompt names is not this user's.
        tab.expect_problem("404.*/editor/api/view")
        tab.sign_in(jobs.web.operator_key, f"/console/jobs/{jobs.failed[0]}")
        tab.page.get_by_role("tab", name="Prompt").click()
        tab.page.get_by_role("button", name="Open in editor").click()
        editor = EditorPage(tab.page, tab.url)
        editor.wait_until_ready()
        # `soften`, in place of what the editor begins with.
        editor.wait_for(lambda: "LoadImage" in editor.node_types(), "the prompt")
        tab.screenshot("prompt in the editor")


def test_pictures_of_a_customer_are_shown_to_those_who_ask_and_the_audit_says_who(
    tab: WebPage, jobs: JobServer, web: WebServer
) -> None:
    page = tab.page
    web.admin("/workflows/negative/resume")
    with web.customer.http() as http:
        effects = {each["slug"]: each["id"] for each in http.get("/api/effects").json()["effects"]}
        body = {"effect_id": effects["negative"], "properties": {"width": 32, "height": 32}}
        made = http.post("/api/ai-jobs", json=body)
        assert made.status_code < 300, made.text
    job_id = jobs.jobs(tenant=str(web.customer.tenant_id))[0]["id"]
    assert jobs.wait_for(job_id) == "completed"
    tab.open(f"/console/jobs/{job_id}")
    expect(page.locator(".job-files")).to_contain_text("Hidden")
    expect(page.locator(".job-print img")).to_have_count(0)
    assert looks(jobs, job_id) == 0
    page.get_by_role("button", name="Show files").click()
    expect(page.locator(".job-print img")).to_have_count(1)
    expect(page.locator(".job-print img")).to_have_js_property("complete", True)
    tab.screenshot("job completed desktop")
    assert looks(jobs, job_id) == 1
    page.get_by_role("button", name="Hide files").click()
    expect(page.locator(".job-print img")).to_have_count(0)


def looks(jobs: JobServer, job_id: str) -> int:
    return len(jobs.get("/audit", action="look_at_files", subject=f"job:{job_id}")["entries"])


def test_a_job_that_is_not_there_leads_on(tab: WebPage) -> None:
    tab.expect_problem("404")
    tab.open("/console/jobs/00000000-0000-4000-8000-000000000000")
    expect(tab.page.get_by_text("Job not found")).to_be_visible()
    tab.page.get_by_role("link", name="All jobs").click()
    expect(tab.page).to_have_url(re.compile("/console/jobs$"))


def test_pages_of_jobs_are_for_everybody(browser: Browser, tab: WebPage, jobs: JobServer) -> None:
    """axe-core and 390 px, with rows and with a whole job."""
    paths = {"jobs": "/console/jobs", "job": f"/console/jobs/{jobs.failed[0]}"}
    with open_page(browser, jobs.web.url, phone=True, theme="light") as phone:
        phone.sign_in(jobs.web.operator_key, "/console/queue")
        for (name, path), page in product(paths.items(), (tab, phone)):
            page.open(path)
            page.screenshot(f"{name} {'phone' if page is phone else 'desktop'}")
            assert page.serious_findings() == []
            assert page.pixels_too_wide() <= 0
        # Words that do not fit into a bar are below it.
        expect(phone.page.locator(".job-times").first).to_contain_text(re.compile("ran|waited"))
        expect(phone.page.locator(".job-bar span:visible")).to_have_count(0)
