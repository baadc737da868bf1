"""Tenants, audit and settings as operators see them; and what a role may not do."""

import csv
import json
import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from tests.support.server.web import WebPage, WebServer, open_page


@pytest.fixture(scope="module")
def tab(browser: Browser, web: WebServer) -> Iterator[WebPage]:
    with open_page(browser, web.url) as page:
        page.sign_in(web.operator_key, "/console/settings")
        yield page


def read(web: WebServer, path: str, **query: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {web.operator_key}"}
    response = httpx.get(f"{web.url}/api/admin{path}", params=query, headers=headers)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def rows(page: Page) -> Locator:
    return page.get_by_role("grid").locator(".table-row")


def store_key(page: Page) -> str:
    """Copies what is shown once, and closes the dialog."""
    key: str = page.get_by_label("The key", exact=True).inner_text().strip()
    page.get_by_label("I have stored it").check()
    page.get_by_role("dialog").get_by_role("button", name=re.compile("^Done")).click()
    expect(page.get_by_text(key)).to_have_count(0)
    return key


def balance_of(web: WebServer, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    response = httpx.get(f"{web.url}/api/wallet", headers=headers)
    assert response.status_code == 200, response.text
    return int(response.json()["balance"])


def test_a_tenant_is_made_credited_and_given_a_key_that_works(tab: WebPage, web: WebServer) -> None:
    page = tab.page
    tab.open("/console/tenants")
    page.get_by_role("button", name="New tenant").click()
    page.get_by_role("button", name="Create tenant").click()
    expect(page.get_by_text("Enter a name.")).to_be_visible()
    page.get_by_label("Name", exact=True).fill("Blitz Lab")
    page.get_by_label("Email of the first user").fill("mara@blitz.example")
    page.keyboard.press("Enter")
    first = store_key(page)
    expect(page).to_have_url(re.compile("/console/tenants/[0-9a-f-]{36}$"))
    expect(page.get_by_role("heading", name="Blitz Lab")).to_be_visible()
    assert balance_of(web, first) == 0

    page.get_by_role("button", name="Credit", exact=True).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Tokens").fill("40")
    dialog.get_by_role("button", name="Credit").click()
    expect(dialog.get_by_text("Enter a reason")).to_be_visible()
    dialog.get_by_label("Reason").fill("invoice 114")
    dialog.get_by_role("button", name="Credit").click()
    expect(page.get_by_text("The new balance is 40 tokens")).to_be_visible()
    assert balance_of(web, first) == 40
    page.get_by_role("tab", name="Wallet").click()
    expect(page.get_by_role("row", name=re.compile("Credited"))).to_contain_text("+40")
    entry = read(web, "/audit", action="credit")["entries"][0]
    assert entry["details"]["reason"] == "invoice 114"

    page.get_by_role("button", name="New key").click()
    page.get_by_label("Name", exact=True).fill("web-shop")
    page.get_by_role("button", name="Create key").click()
    second = store_key(page)
    assert balance_of(web, second) == 40
    page.get_by_role("tab", name="Keys").click()
    row = page.get_by_role("row", name=re.compile("web-shop"))
    expect(row).to_contain_text("Read, Write")
    tab.screenshot("tenant desktop")
    row.get_by_role("button", name="Revoke").click()
    page.get_by_role("button", name="Revoke key").click()
    expect(row).to_have_count(0)
    headers = {"Authorization": f"Bearer {second}"}
    assert httpx.get(f"{web.url}/api/wallet", headers=headers).status_code == 401


def test_a_tenants_limits_are_set_its_users_added_and_its_ledger_checked(
    tab: WebPage, web: WebServer
) -> None:
    page, tenant_id = tab.page, web.customer.tenant_id
    tab.open(f"/console/tenants/{tenant_id}")
    page.get_by_role("button", name="Change").click()
    page.get_by_label("Max. queued jobs").fill("many")
    page.get_by_role("button", name="Save limits").click()
    expect(page.get_by_text("Enter a whole number, or leave empty.")).to_be_visible()
    page.get_by_label("Max. queued jobs").fill("7")
    page.get_by_label("File retention (days)").fill("30")
    page.get_by_label("Storage (GB)").fill("2.5")
    page.get_by_role("button", name="Save limits").click()
    expect(page.get_by_text("Limits saved")).to_be_visible()
    expect(page.get_by_text("up to 7")).to_be_visible()
    tenant = read(web, f"/tenants/{tenant_id}")
    limits = (tenant["max_queued"], tenant["retention_days"], tenant["max_storage_bytes"])
    assert limits == (7, 30, 2_500_000_000)

    page.get_by_role("button", name="Add user").click()
    page.get_by_label("Name", exact=True).fill("Grace")
    page.keyboard.press("Enter")
    expect(page.get_by_role("row", name=re.compile("Grace"))).to_be_visible()
    expect(page.get_by_role("heading", name="Grace")).to_be_visible()
    expect(page.get_by_text("No keys yet")).to_be_visible()
    page.get_by_role("button", name="Deactivate").click()
    page.get_by_role("dialog").get_by_role("button", name="Deactivate").click()
    expect(page.get_by_role("row", name=re.compile("Grace"))).to_contain_text("Deactivated")
    expect(page.get_by_role("button", name="New key")).to_have_attribute("aria-disabled", "true")
    page.get_by_role("button", name="Activate").click()
    expect(page.get_by_role("row", name=re.compile("Grace"))).to_contain_text("Active")

    page.get_by_role("button", name="Check ledger").click()
    expect(page.get_by_text("Ledger is consistent")).to_be_visible()


def test_a_tenants_prompts_are_kept_to_fleets_and_node_types(tab: WebPage, web: WebServer) -> None:
    page, path = tab.page, f"/tenants/{web.customer.tenant_id}"
    tab.open(f"/console{path}")
    expect(page.get_by_text("All that accept prompts")).to_be_visible()
    page.get_by_role("button", name="Edit policy").click()
    page.get_by_role("radio", name="Selected fleets").check()
    expect(
        page.get_by_text("No fleet is selected, so this tenant's prompts are rejected.")
    ).to_be_visible()
    page.get_by_role("checkbox", name="default/production").check()
    deny = page.get_by_label("Also denied node types")
    deny.fill("x" * 201)
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("Enter at most 500 lines of up to 200 characters.")).to_be_visible()
    deny.fill("LoadVideo*\n\n Save? ")
    tab.screenshot("tenant prompts")
    assert tab.serious_findings() == []
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("LoadVideo*, Save?")).to_be_visible()
    terms = {"fleets": ["default/production"], "allow": [], "deny": ["LoadVideo*", "Save?"]}
    assert read(web, f"{path}/prompts") == terms
    page.get_by_role("button", name="Edit policy").click()
    page.get_by_role("radio", name="All that accept prompts").check()
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert read(web, f"{path}/prompts") == {**terms, "fleets": None}


def test_a_tenant_is_erased_by_who_types_its_name(tab: WebPage, web: WebServer) -> None:
    page, made = tab.page, web.admin("/tenants", name="Short-lived")
    tab.open("/console/tenants")
    page.get_by_label("Find a tenant").fill("short-l")
    expect(rows(page)).to_have_count(1)
    rows(page).first.click()
    page.get_by_role("button", name="Erase this tenant").click()
    dialog = page.get_by_role("dialog", name="Permanently erase Short-lived?")
    act = dialog.get_by_role("button", name="Erase this tenant")
    act.click(force=True)
    dialog.get_by_label("Type “Short-lived”").fill("short-lived")
    expect(act).to_have_attribute("aria-disabled", "true")
    page.keyboard.press("Enter")
    assert read(web, f"/tenants/{made['id']}")["erasing_at"] is None
    dialog.get_by_label("Type “Short-lived”").fill("Short-lived")
    tab.screenshot("tenant erase")
    act.click()
    expect(dialog).to_be_hidden()
    expect(page.locator(".page-head")).to_contain_text(re.compile("Being erased|Erased"))
    # By itself: the stream tells that it has ended.
    expect(page.get_by_text("Only the ledger is kept")).to_be_visible()
    assert read(web, f"/tenants/{made['id']}")["erased_at"]
    expect(page.get_by_role("button", name="Erase this tenant")).to_have_count(0)


def make_tenant(web: WebServer, operator_key: str, name: str) -> None:
    headers = {"Authorization": f"Bearer {operator_key}"}
    response = httpx.post(f"{web.url}/api/admin/tenants", json={"name": name}, headers=headers)
    assert response.status_code == 201


def test_the_audit_is_searched_followed_and_exported(tab: WebPage, web: WebServer) -> None:
    page = tab.page
    key = web.admin("/operators", name="ada", role="operator")["key"]
    make_tenant(web, key, "One")
    tab.open("/console/audit")
    expect(rows(page).first).to_be_visible()
    tab.screenshot("audit desktop")
    page.get_by_label("Actor").fill("Ada")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"\?actor=operator%3Aada$"))
    expect(rows(page)).to_have_count(1)
    expect(rows(page).first).to_contain_text("create_tenant")
    # One that is written while the page is open.
    make_tenant(web, key, "Two")
    expect(rows(page)).to_have_count(2)
    page.get_by_role("radio", name="1 h", exact=True).check(force=True)
    expect(page).to_have_url(re.compile(r"span=1h"))
    expect(rows(page)).to_have_count(2)

    for name in ("CSV", "JSON lines"):
        with page.expect_download() as saved:
            page.get_by_role("link", name=name).click()
        text = saved.value.path().read_text(encoding="utf-8")
        if name == "CSV":
            found = [json.loads(each["details"]) for each in csv.DictReader(text.splitlines())]
        else:
            found = [json.loads(each)["details"] for each in text.splitlines()]
        assert [each["name"] for each in found] == ["Two", "One"]


def test_an_entry_of_the_audit_is_opened_and_leads_to_others_like_it(
    tab: WebPage, web: WebServer
) -> None:
    page = tab.page
    key = web.admin("/operators", name="bob", role="operator")["key"]
    make_tenant(web, key, "Three")
    make_tenant(web, key, "Four")
    tab.open("/console/audit?actor=operator:bob")
    expect(rows(page)).to_have_count(2)
    rows(page).first.click()
    dialog = page.get_by_role("dialog", name="Entry: create_tenant")
    expect(dialog).to_contain_text("operator:bob")
    tab.screenshot("audit entry")
    dialog.get_by_role("button", name="Only this target").click()
    expect(rows(page)).to_have_count(1)
    page.get_by_label("Target").fill("tenant:nobody")
    page.keyboard.press("Tab")
    expect(page.get_by_text("No matching entries")).to_be_visible()
    page.get_by_role("button", name="Clear filter").first.click()
    expect(page).to_have_url(re.compile("/console/audit$"))
    page.get_by_label("Tenant").select_option("Three")
    expect(rows(page).first).to_contain_text("create_tenant")


def test_settings_are_found_and_operators_come_and_go(tab: WebPage, web: WebServer) -> None:
    page = tab.page
    tab.open("/console/settings")
    table = page.get_by_role("table", name="Settings in effect")
    page.get_by_label("Find a setting").fill("heartbeat")
    expect(table).to_contain_text("COMFYFLEET_LEASE_SECONDS")
    expect(table).not_to_contain_text("COMFYFLEET_URL_SECONDS")
    page.get_by_label("Find a setting").fill("")
    page.get_by_label("Changed only").check()
    expect(table).to_contain_text("COMFYFLEET_ADMIN_KEY")
    expect(table).to_contain_text("(set)")
    assert web.operator_key not in page.content()

    page.get_by_role("button", name="Add operator").first.click()
    page.get_by_label("Name", exact=True).fill("admin")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_contain_text("“admin” is reserved")
    page.get_by_label("Name", exact=True).fill("grace")
    page.get_by_role("radio", name=re.compile("^Viewer")).check()
    page.get_by_role("dialog").get_by_role("button", name="Add operator").click()
    key = store_key(page)
    row = page.get_by_role("row", name=re.compile("^grace"))
    expect(row).to_contain_text("Viewer")
    tab.screenshot("settings desktop")
    url, headers = f"{web.url}/api/admin/tenants", {"Authorization": f"Bearer {key}"}
    assert httpx.get(url, headers=headers).status_code == 200
    row.get_by_role("button", name="Revoke").click()
    page.get_by_role("button", name="Revoke operator").click()
    expect(row).to_have_count(0)
    assert httpx.get(url, headers=headers).status_code == 401


def test_a_viewer_is_told_what_takes_another_role(browser: Browser, web: WebServer) -> None:
    vera = web.admin("/operators", name="vera", role="viewer")
    otto = web.admin("/operators", name="otto", role="operator")
    path = f"/console/tenants/{web.customer.tenant_id}"
    with open_page(browser, web.url) as tab:
        tab.sign_in(vera["key"], path)
        page = tab.page
        for name in ("Add user", "New key", "Credit", "Change", "Erase this tenant"):
            button = page.get_by_role("button", name=name, exact=True)
            expect(button).to_have_attribute("aria-disabled", "true")
            expect(button).to_have_attribute("title", re.compile("signed in as a viewer"))
        page.get_by_role("button", name="Credit", exact=True).click(force=True)
        expect(page.get_by_role("dialog")).to_have_count(0)
        tab.open("/console/settings")
        add = page.get_by_role("button", name="Add operator").first
        expect(add).to_have_attribute("title", re.compile("Owners only"))
    with open_page(browser, web.url) as tab:
        tab.sign_in(otto["key"], path)
        page = tab.page
        expect(page.get_by_role("button", name="New key")).not_to_have_attribute(
            "aria-disabled", "true"
        )
        page.get_by_role("button", name="Change").click()
        expect(page.get_by_label("Storage (GB)")).not_to_be_editable()
        expect(page.get_by_role("dialog")).to_contain_text("Owners only")
        page.get_by_label("Max. queued jobs").fill("9")
        page.get_by_role("button", name="Save limits").click()
        expect(page.get_by_text("Limits saved")).to_be_visible()


def test_a_tenant_that_is_not_there_leads_on(tab: WebPage) -> None:
    tab.expect_problem("404")
    tab.open("/console/tenants/00000000-0000-4000-8000-000000000000")
    expect(tab.page.get_by_text("Tenant not found")).to_be_visible()
    tab.page.get_by_role("link", name="All tenants").click()
    expect(tab.page).to_have_url(re.compile("/console/tenants$"))


def test_pages_of_tenants_are_for_everybody(browser: Browser, tab: WebPage, web: WebServer) -> None:
    """axe-core and 390 px, with rows in them."""
    paths = {
        "tenants": "/console/tenants",
        "tenant": f"/console/tenants/{web.customer.tenant_id}",
        "audit": "/console/audit",
        "settings": "/console/settings",
    }
    with open_page(browser, web.url, phone=True, theme="light") as phone:
        phone.sign_in(web.operator_key, "/console/settings")
        for (name, path), page in product(paths.items(), (tab, phone)):
            page.open(path)
            page.screenshot(f"{name} {'phone' if page is phone else 'desktop'}")
            assert page.serious_findings() == []
            assert page.pixels_too_wide() <= 0
