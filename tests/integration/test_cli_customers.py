"""Customers from the command line: tenants, their keys and wallets, effects, the books."""

import json

import pytest
from tests.support.server.commands import NEGATIVE, Admin
from tests.support.server.small_http import Answer, serving


@pytest.fixture
def tenant(admin: Admin) -> str:
    made = admin("tenants", "create", "Ada & Co", "--email", "ada@example.com", "--json")
    assert made.code == 0, made.err
    tenant_id: str = made.json["id"]
    return tenant_id


def test_a_tenants_key_is_all_that_is_printed(admin: Admin) -> None:
    made = admin("tenants", "create", "Bob")
    assert made.out.startswith("cf_")
    assert len(made.out.split()) == 1
    assert "with user" in made.err


def test_a_payment_is_credited_once_and_seen(admin: Admin, tenant: str) -> None:
    for _ in range(2):
        paid = admin("tenants", "credit", tenant, "500", "--payment", f"of-{tenant}")
        assert paid.code == 0, paid.err
        assert "has 500 tokens" in paid.err
    shown = admin("tenants", "show", tenant)
    assert "ada@example.com" in shown.out
    assert "500" in shown.out
    assert admin("ledger", "verify").err.strip() == "everything adds up"
    assert admin("ledger", "verify", "--tenant", tenant, "--json").json["is_sound"] is True


def test_keys_are_made_listed_and_revoked(admin: Admin, tenant: str) -> None:
    made = admin(
        "tenants", "keys", "create", tenant, "--name", "site", "--scope", "read", "--json"
    ).json
    assert made["key"].startswith("cf_")
    listed = admin("tenants", "keys", "list", tenant)
    assert "site" in listed.out
    assert made["key"] not in listed.out
    revoked = admin("tenants", "keys", "revoke", tenant, made["id"])
    assert "is revoked" in revoked.err


def test_which_user_must_be_named_when_there_is_none_but_one(admin: Admin) -> None:
    listed = admin("tenants", "list", "--json").json["tenants"]
    default = next(each["id"] for each in listed if each["name"] == "default")
    refused = admin("tenants", "credit", default, "5", "--payment", "pi_2")
    assert (refused.code, "has no user" in refused.err) == (1, True)


def test_retention_is_set_and_taken_back(admin: Admin, tenant: str) -> None:
    assert "for 30 days" in admin("tenants", "retention", tenant, "30").err
    assert admin("tenants", "show", tenant, "--json").json["retention_days"] == 30
    assert "for the default period" in admin("tenants", "retention", tenant).err


def test_erasing_asks_first_and_then_waits_for_the_end(admin: Admin, tenant: str) -> None:
    refused = admin("tenants", "erase", tenant)
    assert (refused.code, "can't be undone" in refused.err) == (1, True)
    done = admin("tenants", "erase", tenant, "--yes")
    assert (done.code, "its ledger is kept" in done.err) == (0, True), done.err
    shown = admin("tenants", "show", tenant, "--json").json
    assert (shown["name"], shown["users"][0]["email"]) == ("erased", None)


def test_an_effect_is_made_changed_and_withdrawn(admin: Admin) -> None:
    made = admin("effects", "create", "dark", "negative", "--price", "5", "--set", "width=96")
    assert made.code == 0, made.err
    assert "effects publish dark" in made.err
    assert admin("effects", "publish", "dark").code == 0
    assert admin("effects", "change", "dark", "--title", "Dark", "--price", "6").code == 0
    for flags, is_on in (
        (("--reuse", "--keep-metadata"), True),
        (("--no-reuse", "--no-keep-metadata"), False),
    ):
        assert admin("effects", "change", "dark", *flags).code == 0
        shown = admin("effects", "show", "dark", "--json").json
        assert (shown["reuse"], shown["keep_metadata"]) == (is_on, is_on)
    nothing = admin("effects", "change", "dark")
    assert (nothing.code, "specify at least one field" in nothing.err) == (1, True)
    bad = admin("effects", "create", "Not a slug", "negative", "--price", "5")
    assert (bad.code, "the slug of an effect must" in bad.err) == (1, True)
    shown = admin("effects", "show", "dark", "--json").json
    wanted = ("Dark", 6, True, {"width": 96})
    found = (shown["title"], shown["price_tokens"], shown["published"], shown["overrides"])
    assert found == wanted
    assert "dark" in admin("effects", "list").out
    refused = admin("workflows", "register", "negative", NEGATIVE)
    assert (refused.code, "published effects" in refused.err) == (1, True)
    assert "--break-effects" in refused.err
    forced = admin("workflows", "register", "negative", NEGATIVE, "--break-effects")
    assert (forced.code, "dark no longer fits" in forced.err) == (0, True)
    assert "is withdrawn" in admin("effects", "withdraw", "dark").err
    unknown = admin("effects", "create", "x", "negative", "--set", "nothing=1")
    assert (unknown.code, "nothing" in unknown.err) == (1, True)


TENANT_ID = "00000000-0000-0000-0000-000000000001"
AWAY = Answer(b'{"error": {"code": "unavailable", "message": "it can\'t be reached"}}', 503)


def test_a_tenant_whose_pool_is_down_is_shown_as_far_as_known() -> None:
    path = f"/api/admin/tenants/{TENANT_ID}"
    known = json.dumps({"id": TENANT_ID, "name": "Ada & Co", "pool": "eu"}).encode()
    with serving({path: Answer(known), f"{path}/users": AWAY}) as plane:
        shown = Admin(plane.url, "key")("tenants", "show", TENANT_ID)
        as_json = Admin(plane.url, "key")("tenants", "show", TENANT_ID, "--json")
    assert shown.code == as_json.code == 1
    assert "Ada & Co" in shown.out
    assert "in pool eu could not be read: it can't be reached" in shown.err
    assert (as_json.json["pool"], as_json.json["users"]) == ("eu", None)


@pytest.mark.parametrize("found", [0, 1])
def test_books_that_could_not_be_read_are_named_and_are_not_sound(found: int) -> None:
    drift = {"fault": "balance", "tenant_id": TENANT_ID, "message": "5 and not 6"}
    books = {
        "is_sound": False,
        "found": found,
        "drifts": [drift] * found,
        "pools_left_out": ["eu", "us"],
    }
    with serving({"/api/admin/ledger": Answer(json.dumps(books).encode())}) as plane:
        verified = Admin(plane.url, "key")("ledger", "verify")
    assert verified.code == 1
    assert "pools that can't be reached were not verified: eu, us" in verified.err
    assert ("5 and not 6" in verified.out, "1 inconsistency found" in verified.err) == (
        bool(found),
        bool(found),
    )
