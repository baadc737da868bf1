"""What operators do from the command line: people, jobs, offers, quotas, fleets, workers' keys."""

from dataclasses import replace
from uuid import uuid4

import httpx
import pytest
from tests.support.server.commands import NEGATIVE, Admin


def job_of(admin: Admin, *arguments: str) -> str:
    submitted = admin("submit", "plain", *arguments)
    assert submitted.code == 0, submitted.err
    return submitted.out.strip()


@pytest.fixture(scope="module", autouse=True)
def plain(admin: Admin) -> None:
    """A workflow that no other test changes."""
    sizes = ("--property", "width:integer=2.width")
    assert admin("workflows", "register", "plain", NEGATIVE, *sizes).code == 0


@pytest.fixture(scope="module")
def fleet(admin: Admin) -> str:
    made = admin("fleets", "create", "spare")
    assert made.code == 0, made.err
    return made.out.strip()


def join(admin: Admin, secret: str, worker_id: str) -> str:
    body = {"worker_id": worker_id, "fleet_slug": "spare", "stage": "production"}
    headers = {"X-Fleet-Secret": secret}
    url = f"{admin.url}/api/worker/register"
    answer = httpx.post(
        url, json={**body, "max_concurrency": 1, "protocol_version": 1}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    token: str = answer.json()["token"]
    return token


def poll(admin: Admin, worker_id: str, token: str) -> int:
    headers = {"Authorization": f"Bearer {token}"}
    body = {"worker_id": worker_id, "wait_seconds": 0}
    return httpx.post(f"{admin.url}/api/worker/poll", json=body, headers=headers).status_code


def test_an_operators_key_is_all_that_is_printed_and_opens_what_its_role_may(admin: Admin) -> None:
    added = admin("operators", "add", "vera", "--role", "viewer")
    assert (added.code, len(added.out.split())) == (0, 1), added.err
    assert "viewer vera" in added.err
    vera = replace(admin, key=added.out.strip())
    assert vera("workflows", "list").code == 0
    refused = vera("workflows", "pause", "plain")
    assert refused.code == 1
    assert "operator" in refused.err


def test_operators_are_listed_with_role_and_without_key(admin: Admin) -> None:
    key = admin("operators", "add", "omar", "--json").json["key"]
    listed = admin("operators", "list")
    row = next(line for line in listed.out.splitlines() if "omar" in line)
    assert "operator" in row
    assert key not in listed.out
    again = admin("operators", "add", "omar")
    assert (again.code, "omar" in again.err) == (1, True)


def test_a_revoked_operators_key_is_refused_at_once(admin: Admin) -> None:
    key = admin("operators", "add", "olga", "--role", "owner", "--json").json["key"]
    olga = replace(admin, key=key)
    assert olga("operators", "list").code == 0
    assert "the key of olga is revoked" in admin("operators", "revoke", "olga").err
    assert olga("operators", "list").code == 1
    listed = admin("operators", "list", "--json").json["operators"]
    assert next(each for each in listed if each["name"] == "olga")["revoked_at"]
    unknown = admin("operators", "revoke", "nobody-of-that-name")
    assert (unknown.code, "nobody-of-that-name" in unknown.err) == (1, True)


def test_jobs_of_all_tenants_are_listed_by_what_is_wanted(admin: Admin) -> None:
    tenant = admin("tenants", "create", "Carol", "--json").json["id"]
    theirs = job_of(admin, "--tenant", tenant)
    other = job_of(admin)
    listed = admin("jobs", "list").out
    assert theirs in listed
    assert other in listed
    of_tenant = admin("jobs", "list", "--tenant", tenant, "--json").json["jobs"]
    assert [each["id"] for each in of_tenant] == [theirs]
    first = admin("jobs", "list", "--limit", "1")
    assert "next page: --after" in first.err
    older = admin("jobs", "list", "--limit", "1", "--after", first.err.split()[-1]).out
    assert (other in first.out, theirs in older) == (True, True)
    none = admin("jobs", "list", "--tenant", tenant, "--status", "failed")
    assert "there are no matching jobs" in none.out + none.err


def test_a_job_is_shown_by_its_id_alone_with_why_it_waits(admin: Admin) -> None:
    tenant = admin("tenants", "create", "Dave", "--json").json["id"]
    job = job_of(admin, "--tenant", tenant)
    shown = admin("jobs", "show", job)
    assert (tenant in shown.out, "queued" in shown.out) == (True, True)
    assert "fleet" in shown.out
    assert admin("jobs", "show", job, "--tenant", str(uuid4())).code == 1
    unknown = admin("jobs", "show", str(uuid4()))
    assert (unknown.code, "was not found" in unknown.err.lower()) == (1, True)


def test_the_prompt_is_shown_as_workers_get_it_before_any_was_sent(admin: Admin) -> None:
    job = job_of(admin, "--set", "width=72")
    shown = admin("jobs", "prompt", job)
    assert shown.code == 0, shown.err
    assert "no worker has reported what it sent" in shown.err
    assert shown.json["2"]["inputs"]["width"] == 72
    assert admin("jobs", "prompt", job, "--json").json["attempts"] == []


def test_a_quota_is_looked_at_set_and_taken_back(admin: Admin) -> None:
    tenant = admin("tenants", "create", "Erin", "--json").json["id"]
    before = admin("tenants", "quota", tenant, "--json").json["max_storage_bytes"]
    assert "0 of 5,000 bytes are used" in admin("tenants", "quota", tenant, "5000").err
    assert admin("tenants", "quota", tenant, "--json").json["max_storage_bytes"] == 5000
    back = admin("tenants", "quota", tenant, "--as-settings", "--json").json
    assert back["max_storage_bytes"] == before
    assert admin("tenants", "quota", tenant, "-5").code != 0


def test_storage_shows_objects_without_a_row(admin: Admin) -> None:
    tenant = admin("tenants", "create", "Olga", "--json").json["id"]
    assert "0 objects have no row" in admin("tenants", "storage", tenant).err
    assert admin("tenants", "storage", tenant, "--json").json["unnamed_objects"] == 0


def test_a_workflow_is_offered_and_withdrawn(admin: Admin) -> None:
    def price() -> int | None:
        found: int | None = admin("workflows", "show", "plain", "--json").json["price_tokens"]
        return found

    assert "is offered at 3 tokens" in admin("workflows", "offer", "plain", "--price", "3").err
    assert price() == 3
    assert admin("workflows", "offer", "plain", "--price", "0").code == 0
    assert price() == 0
    assert "is no longer offered" in admin("workflows", "withdraw", "plain").err
    assert price() is None
    assert admin("workflows", "offer", "plain", "--price", "-1").code != 0
    close = admin("workflows", "offer", "plai", "--price", "1")
    assert (close.code, "plain" in close.err) == (1, True)


def test_terms_of_a_workflow_are_changed(admin: Admin) -> None:
    changed = admin("workflows", "change", "negative", "--ai-mark", "generated", "--json")
    assert changed.json["ai_mark"] == "generated"
    assert (
        "was changed" in admin("workflows", "change", "negative", "--output-rule", "optional").err
    )
    shown = admin("workflows", "show", "negative", "--json").json
    assert (shown["ai_mark"], shown["output"]) == ("generated", "optional")
    assert "--ai-mark" in admin("workflows", "change", "negative").err
    admin("workflows", "change", "negative", "--ai-mark", "auto", "--output-rule", "required")


def test_who_joins_waits_where_approval_is_manual(admin: Admin, fleet: str) -> None:
    assert admin("fleets", "approval", "spare", "manual").code == 0
    join(admin, fleet, "waits")
    assert admin("workers", "show", "waits", "--json").json["state"] == "pending"
    assert "is approved" in admin("workers", "approve", "waits").err
    assert "spare/production: auto" in admin("fleets", "approval", "spare", "auto").err
    join(admin, fleet, "at-once")
    assert admin("workers", "show", "at-once", "--json").json["state"] != "pending"
    assert admin("fleets", "approval", "spare", "never").code != 0


def test_a_rotated_key_replaces_the_old_one_when_it_is_first_used(admin: Admin, fleet: str) -> None:
    old = join(admin, fleet, "turns")
    rotated = admin("workers", "rotate-key", "turns")
    assert (rotated.code, len(rotated.out.split())) == (0, 1), rotated.err
    assert poll(admin, "turns", old) == 200
    assert poll(admin, "turns", rotated.out.strip()) == 200
    assert poll(admin, "turns", old) == 401


def test_a_key_rotated_now_kills_the_old_one_at_once(admin: Admin, fleet: str) -> None:
    old = join(admin, fleet, "leaked")
    new = admin("workers", "rotate-key", "leaked", "--now", "--json").json["token"]
    assert poll(admin, "leaked", old) == 401
    assert poll(admin, "leaked", new) == 200


def test_a_tenant_that_is_named_by_its_name_is_found_by_its_id(admin: Admin) -> None:
    tenant = admin("tenants", "create", "Grace", "--json").json["id"]
    refused = admin("tenants", "show", "Grace")
    assert (refused.code, "use the tenant's id" in refused.err) == (1, True), refused.err
    assert tenant in refused.err


def test_a_fleet_takes_prompts_on_the_terms_that_an_operator_sets(admin: Admin, fleet: str) -> None:
    assert admin("fleets", "prompts", "spare", "--json").json["is_open"] is False
    opened = admin("fleets", "prompts", "spare", "--open", "--price", "3", "--deny", "KSampler*")
    assert (opened.code, "KSampler*" in opened.out) == (0, True), opened.err
    shown = admin("fleets", "prompts", "spare", "--per-second", "0.5", "--json")
    assert shown.code != 0
    shown = admin("fleets", "prompts", "spare", "--price-per-second", "0.5", "--json").json
    kept = ("is_open", "price_tokens", "price_per_second", "deny")
    assert [shown[each] for each in kept] == [True, 0, 0.5, ["KSampler*"]]
    assert admin("fleets", "prompts", "spare", "--deny", "", "--json").json["deny"] == []
    assert admin("fleets", "prompts", "spare", "--close", "--json").json["is_open"] is False
    of_fleet = ("--action", "set_prompts", "--subject", "fleet:spare/production")
    noted = admin("audit", *of_fleet, "--json").json["entries"]
    assert len(noted) == 4
    assert noted[0]["details"]["is_open"] is False


def test_a_fleet_that_is_opened_below_the_price_of_a_workflow_is_warned_of(
    admin: Admin, fleet: str
) -> None:
    assert admin("workflows", "register", "dear", NEGATIVE, "--price", "7").code == 0
    assert admin("fleets", "assign", "spare", "dear").code == 0
    for price, warns in (("6", True), ("7", False)):
        opened = admin("fleets", "prompts", "spare", "--open", "--price", price)
        assert opened.code == 0, opened.err
        assert ("less than the workflow dear (7 tokens)" in opened.err) is warns, opened.err
    assert admin("fleets", "prompts", "spare", "--close").code == 0


def test_terms_of_prompts_that_make_no_sense_are_refused(admin: Admin, fleet: str) -> None:
    for wrong in (
        ("--price", "-1"),
        ("--nodes-max", "0"),
        ("--allow", "a\nb"),
        ("--passthrough", "/api/../admin"),
        ("--passthrough", "/"),
        ("--price-per-second", "0"),
    ):
        refused = admin("fleets", "prompts", "spare", *wrong)
        assert (refused.code, refused.out) == (1, ""), wrong
    assert admin("fleets", "prompts", "nowhere").code == 1


def test_the_order_of_a_clients_prompts_is_turned_off_for_a_fleet(admin: Admin, fleet: str) -> None:
    before = admin("fleets", "prompts", "spare", "--json").json
    assert before["in_order"] is True
    changed = admin("fleets", "set", "spare", "--any-order", "--starts-within", "60")
    assert changed.code == 0
    assert "start within 60 s" in changed.err
    assert "all messages at once" in changed.err
    # The other terms stay.
    shown = admin("fleets", "prompts", "spare", "--json").json
    assert shown == {**before, "in_order": False}
    assert (
        admin("fleets", "prompts", "spare", "--nodes-max", "9", "--json").json["in_order"] is False
    )
    assert admin("fleets", "set", "spare", "--in-order", "--json").json["in_order"] is True
    assert admin("fleets", "show", "spare", "--json").json["starts_within_seconds"] == 60
    admin("fleets", "set", "spare", "--starts-within", "0")
    refused = admin("fleets", "set", "spare")
    assert (refused.code, "--any-order" in refused.err) == (1, True), refused.err


def test_a_tenants_prompts_may_use_the_fleets_that_an_operator_names(
    admin: Admin, fleet: str
) -> None:
    tenant = admin("tenants", "create", "Terms", "--json").json["id"]
    assert admin("tenants", "prompts", tenant, "--json").json["fleets"] is None
    named = ("--fleet", "spare/production", "--deny", "LoadImage")
    set_terms = admin("tenants", "prompts", tenant, *named, "--json").json
    assert set_terms == {"fleets": ["spare/production"], "allow": [], "deny": ["LoadImage"]}
    assert admin("tenants", "prompts", tenant, "--fleet", "no-such/one").code == 1
    assert admin("tenants", "prompts", tenant, "--any-fleet", "--json").json["fleets"] is None
