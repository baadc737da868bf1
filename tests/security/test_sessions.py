"""Browsers that sign in: what their cookie is worth, to whom, for how long, and from which page."""

import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import func, select, text
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import (
    ADMIN_KEY,
    URL,
    client_of,
    documented_routes,
    plane_on,
)
from tests.support.server.sessions import BrowserClient, browser_at

from comfyfleet.clock import utc_now
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.db.central_tables import sessions as sessions_table
from comfyfleet.server.http.middleware import FREE_TRIES, WrongKeyThrottle
from comfyfleet.server.http.sessions import COOKIE, CSRF_HEADER, SECURE_COOKIE, csrf_token
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants import sessions
from comfyfleet.server.tenants.model import SESSIONS_PER_KEY_MAX, Scope

ENOUGH: dict[str, Any] = {"calls_per_second": 1_000_000, "calls_at_once": 1_000_000}
FOREIGN: list[dict[str, str]] = [
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://sub.control.test"},
    {"Origin": "http://control.test:3000"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]
WRITES = ("POST", "PUT", "PATCH", "DELETE")
OTHERS = ("/api/catalogue", "/api/shared/", "/api/admin/", "/api/worker/", "/api/session")


@pytest.fixture
async def plane(databases: Databases, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    async with plane_on(databases, tmp_path, **ENOUGH) as plane:
        yield plane


@pytest.fixture
async def sqlite_plane(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    async with plane_on(sqlite_databases, tmp_path, **ENOUGH) as plane:
        yield plane


async def new_tenant(plane: ControlPlane, name: str = "Ada's films") -> dict[str, Any]:
    async with client_of(plane) as admin:
        made = await admin.post("/api/admin/tenants", json={"name": name, "email": "ada@x.test"})
        assert made.status_code == 201, made.text
        found: dict[str, Any] = made.json()
        return found


async def new_operator(plane: ControlPlane, role: str, name: str = "grace") -> str:
    async with client_of(plane) as admin:
        made = await admin.post("/api/admin/operators", json={"name": name, "role": role})
        assert made.status_code == 201, made.text
        key: str = made.json()["key"]
        return key


def routes_below(plane: ControlPlane, *prefixes: str) -> list[tuple[str, str]]:
    """Method and path of each route, with ids of things that are not there."""
    nobody = str(uuid4())
    return [
        (method.upper(), re.sub(r"\{\w+\}", nobody, path))
        for path, methods in documented_routes(plane).items()
        if path.startswith(prefixes)
        for method in methods
    ]


def customers_routes(plane: ControlPlane) -> list[tuple[str, str]]:
    return [each for each in routes_below(plane, "/api/") if not each[1].startswith(OTHERS)]


async def test_a_customer_signs_in_by_a_cookie_that_no_script_and_no_other_site_has(
    plane: ControlPlane,
) -> None:
    made = await new_tenant(plane)
    async with browser_at(plane) as browser:
        assert (await browser.who())["signed_in"] is False
        answer = await browser.client.post("/api/session", json={"key": made["key"]})
        said = answer.headers["set-cookie"]
        assert re.match(
            rf"{COOKIE}=[0-9a-f]{{64}}; HttpOnly; Max-Age=\d+; Path=/; SameSite=strict$", said
        )
        assert made["key"] not in said + answer.text
        found = answer.json()
        assert (found["signed_in"], found["kind"], found["kinds"]) == (
            True,
            "customer",
            ["customer"],
        )
        assert found["tenant"] == {"id": made["id"], "name": "Ada's films"}
        assert found["user"] == {"id": made["user_id"], "name": None, "email": "ada@x.test"}
        assert found["scopes"] == ["keys", "read", "write"]
        assert (found["operator"], found["role"]) == (None, None)
        assert found["ways"] == {"key": True, "one_click": False, "oidc": False, "oidc_name": None}
        assert await browser.who() == found
        assert (await browser.call("GET", "/api/wallet")).json() == {"balance": 0}
        async with plane.central.read() as tx:
            rows = [dict(row._mapping) for row in await tx.execute(select(sessions_table))]
        assert str(browser.secret) not in str(rows)


async def test_behind_tls_the_cookie_is_this_hosts_and_for_tls_only(plane: ControlPlane) -> None:
    made = await new_tenant(plane)
    tls = {"X-Forwarded-Proto": "https"}
    async with browser_at(plane) as browser:
        answer = await browser.client.post("/api/session", json={"key": made["key"]}, headers=tls)
        cookie = SimpleCookie(answer.headers["set-cookie"])[SECURE_COOKIE]
        assert (cookie["secure"], cookie["path"], cookie["domain"]) == (True, "/", "")
        good = {**tls, "Cookie": f"{SECURE_COOKIE}={cookie.value}"}
        assert (await browser.client.get("/api/wallet", headers=good)).status_code == 200
        # One that a neighbour of the domain has planted is not looked at.
        planted = {**tls, "Cookie": f"{COOKIE}={cookie.value}"}
        assert (await browser.client.get("/api/wallet", headers=planted)).status_code == 401


async def test_operators_sign_in_with_their_role_and_the_admin_key_as_first_owner(
    plane: ControlPlane,
) -> None:
    key = await new_operator(plane, "viewer")
    async with browser_at(plane) as browser:
        found = await browser.sign_in(key)
        assert (found["kind"], found["operator"], found["role"]) == (
            "operator",
            "operator:grace",
            "viewer",
        )
        assert found["tenant"] is None
        assert (await browser.call("GET", "/api/admin/fleets")).status_code == 200
        body = {"slug": "a", "stage": "production"}
        assert (await browser.call("POST", "/api/admin/fleets", json=body)).status_code == 403
        found = await browser.sign_in(ADMIN_KEY)
        assert (found["operator"], found["role"]) == ("admin", "owner")
        assert (await browser.call("POST", "/api/admin/fleets", json=body)).status_code == 201
        audit = (await browser.call("GET", "/api/admin/audit?action=sign_in")).json()["entries"]
        assert [each["actor"] for each in audit] == ["admin", "operator:grace"]


async def test_one_person_is_customer_and_operator_at_once_and_signs_out_of_both(
    plane: ControlPlane,
) -> None:
    made = await new_tenant(plane)
    async with browser_at(plane) as browser:
        await browser.sign_in(made["key"])
        first = browser.secret
        found = await browser.sign_in(ADMIN_KEY)
        assert found["kinds"] == ["operator", "customer"]
        assert found["tenant"]["id"] == made["id"]
        assert browser.secret != first
        for path in ("/api/wallet", "/api/admin/fleets"):
            assert (await browser.call("GET", path)).status_code == 200
        answer = await browser.sign_out()
        assert answer.headers["clear-site-data"] == '"storage"'
        assert "Max-Age=0" in answer.headers["set-cookie"]
        assert browser.secret is None
        assert (await browser.who())["signed_in"] is False


async def test_a_secret_that_was_there_before_the_sign_in_is_worth_nothing_after_it(
    plane: ControlPlane,
) -> None:
    made = await new_tenant(plane)
    planted = "0" * 64
    async with browser_at(plane) as browser:
        browser.client.cookies.set(COOKIE, planted, domain="control.test")
        await browser.sign_in(made["key"])
        second = browser.secret
        await browser.sign_in(ADMIN_KEY)
        for secret in (planted, second):
            async with browser_at(plane) as thief:
                thief.client.cookies.set(COOKIE, str(secret), domain="control.test")
                assert (await thief.who())["signed_in"] is False
                for path in ("/api/wallet", "/api/admin/fleets"):
                    assert (await thief.call("GET", path)).status_code == 401


async def test_every_customers_route_takes_the_cookie_and_every_change_the_token(
    sqlite_plane: ControlPlane,
) -> None:
    made = await new_tenant(sqlite_plane)
    routes = customers_routes(sqlite_plane)
    assert len(routes) > 50
    async with browser_at(sqlite_plane) as browser:
        await browser.sign_in(made["key"])
        await _tries(browser, routes)


async def test_every_operators_route_takes_the_cookie_and_every_change_the_token(
    sqlite_plane: ControlPlane,
) -> None:
    routes = routes_below(sqlite_plane, "/api/admin/")
    assert len(routes) > 60
    async with browser_at(sqlite_plane) as browser:
        await browser.sign_in(ADMIN_KEY)
        await _tries(browser, routes)


async def _tries(browser: BrowserClient, routes: list[tuple[str, str]]) -> None:
    own = {"Origin": URL, "Sec-Fetch-Site": "same-origin"}
    for method, path in routes:
        if method in WRITES:
            for wrong in ({}, {CSRF_HEADER: ""}, {CSRF_HEADER: "0" * 64}, {CSRF_HEADER: "é"}):
                assert await browser.status(method, path, {**own, **wrong}) == 403, (method, path)
        status = await browser.status(method, path, browser.headers)
        assert status not in (401, 403), (method, path, status)
        for foreign in FOREIGN:
            headers = {**browser.headers, **foreign}
            assert await browser.status(method, path, headers) == 403, (method, path, foreign)


async def test_no_cache_keeps_what_a_browser_that_is_signed_in_reads(
    sqlite_plane: ControlPlane,
) -> None:
    """A proxy sees no key in such a request, and the next user of a browser asks for the same addresses."""
    made = await new_tenant(sqlite_plane)
    async with browser_at(sqlite_plane) as browser:
        await browser.sign_in(made["key"])
        await browser.sign_in(ADMIN_KEY)
        sent = {"image": ("mine.png", b"bytes", "image/png")}
        assert (await browser.call("POST", "/upload/image", files=sent)).status_code == 200
        picture = await browser.call("GET", "/view?filename=mine.png&type=input")
        assert picture.content == b"bytes"
        assert picture.headers["cache-control"] == "private, no-cache"
        for path in ("/api/wallet", "/api/keys", "/api/admin/tenants", "/settings",
                     "/editor/api/settings", "/api/videos/nothing"):  # fmt: skip
            answer = await browser.call("GET", path)
            assert answer.headers["cache-control"] == "no-store", path
            assert answer.headers["x-content-type-options"] == "nosniff", path


async def test_a_customers_cookie_is_nobody_to_operators_routes_and_the_other_way_round(
    sqlite_plane: ControlPlane,
) -> None:
    made = await new_tenant(sqlite_plane)
    operators = routes_below(sqlite_plane, "/api/admin/")
    workers = routes_below(sqlite_plane, "/api/worker/")
    customers = customers_routes(sqlite_plane)
    for key, others in ((made["key"], operators), (ADMIN_KEY, customers)):
        async with browser_at(sqlite_plane) as browser:
            await browser.sign_in(key)
            for method, path in (*others, *workers):
                status = await browser.status(method, path, browser.headers)
                assert status == 401, (method, path)


async def test_a_key_in_the_header_wins_over_the_cookie_and_needs_no_token(
    plane: ControlPlane,
) -> None:
    ada, grace = await new_tenant(plane), await new_tenant(plane, "Grace")
    async with browser_at(plane) as browser:
        await browser.sign_in(ada["key"])
        bearer = {"Authorization": f"Bearer {grace['key']}", "Origin": "https://elsewhere.test"}
        made = await browser.client.post("/api/keys", json={"name": "hers"}, headers=bearer)
        assert made.status_code == 201
        hers = (await browser.client.get("/api/keys", headers=bearer)).json()["keys"]
        assert "hers" in [each["name"] for each in hers]
        mine = (await browser.call("GET", "/api/keys")).json()["keys"]
        assert "hers" not in [each["name"] for each in mine]
        wrong = {**browser.headers, "Authorization": "Bearer cf_" + "0" * 64}
        assert (await browser.client.get("/api/wallet", headers=wrong)).status_code == 401


async def test_another_site_can_neither_sign_in_nor_out(plane: ControlPlane) -> None:
    made = await new_tenant(plane)
    async with browser_at(plane) as browser:
        for foreign in FOREIGN:
            body = {"key": made["key"]}
            refused = await browser.client.post("/api/session", json=body, headers=foreign)
            assert refused.status_code == 403
            assert "set-cookie" not in refused.headers
        await browser.sign_in(made["key"])
        for headers in (*FOREIGN, {"Origin": URL}):
            refused = await browser.client.delete("/api/session", headers=headers)
            assert refused.status_code == 403
        assert (await browser.who())["signed_in"] is True


async def test_a_link_may_be_followed_and_a_page_of_another_site_reads_nothing(
    plane: ControlPlane,
) -> None:
    made = await new_tenant(plane)
    async with browser_at(plane) as browser:
        await browser.sign_in(made["key"])
        link = {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate"}
        assert await browser.status("GET", "/api/wallet", link) == 200
        assert await browser.status("POST", "/api/keys", {**browser.headers, **link}) == 403


async def test_a_key_that_may_only_read_signs_in_to_read(plane: ControlPlane) -> None:
    made = await new_tenant(plane)
    async with client_of(plane, made["key"]) as ada:
        wanted = {"name": "reader", "scopes": [Scope.READ]}
        key = (await ada.post("/api/keys", json=wanted)).json()["key"]
    async with browser_at(plane) as browser:
        assert (await browser.sign_in(key))["scopes"] == ["read"]
        assert (await browser.call("GET", "/api/wallet")).status_code == 200
        assert (await browser.call("GET", "/api/keys")).status_code == 403


async def test_a_revoked_key_ends_its_sessions_at_once_and_so_does_a_revoked_operator(
    plane: ControlPlane,
) -> None:
    made, operator = await new_tenant(plane), await new_operator(plane, "owner")
    async with browser_at(plane) as browser, client_of(plane) as admin:
        await browser.sign_in(made["key"])
        await browser.sign_in(operator)
        user = f"/api/admin/tenants/{made['id']}/users/{made['user_id']}"
        assert (await admin.post(f"{user}/deactivate")).status_code == 200
        assert (await browser.call("GET", "/api/wallet")).status_code == 401
        assert (await browser.who())["kinds"] == ["operator"]
        await admin.post("/api/admin/operators/grace/revoke")
        assert (await browser.call("GET", "/api/admin/fleets")).status_code == 401
        assert (await browser.who())["signed_in"] is False


async def test_what_one_control_plane_ends_is_over_at_the_other(
    databases: Databases, tmp_path: Path
) -> None:
    if not databases.server_url:
        pytest.skip("SQLite means one process")
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(plane_on(databases, tmp_path / "a"))
        names = ("central_database_url", "tenant_database_urls")
        places = {name: getattr(a.settings, name) for name in names}
        b = await stack.enter_async_context(plane_on(databases, tmp_path / "b", **places))
        other_key = {**places, "admin_key": "another-admin-key"}
        c = await stack.enter_async_context(plane_on(databases, tmp_path / "c", **other_key))
        made, operator = await new_tenant(a), await new_operator(a, "viewer")
        at = [await stack.enter_async_context(browser_at(each)) for each in (a, b, c)]

        async def kinds() -> list[list[str]]:
            for other in at[1:]:
                other.client.cookies = at[0].client.cookies
            return [(await each.who())["kinds"] for each in at]

        await at[0].sign_in(made["key"])
        await at[0].sign_in(ADMIN_KEY)
        both = ["operator", "customer"]
        # Where another admin key is in force, the first owner's sign-in is over.
        assert await kinds() == [both, both, ["customer"]]
        await at[0].sign_in(operator)
        assert await kinds() == [both, both, both]
        async with client_of(b) as admin:
            await admin.post("/api/admin/operators/grace/revoke")
        assert await kinds() == [["customer"]] * 3
        secret = str(at[0].secret)
        at[1].csrf = at[0].csrf
        await at[1].sign_out()
        at[0].client.cookies.set(COOKIE, secret, domain="control.test")
        assert await kinds() == [[]] * 3


async def test_a_session_ends_in_time_an_operators_sooner_and_never_after_its_key(
    databases: Databases, tmp_path: Path
) -> None:
    now = [utc_now()]
    hours: dict[str, Any] = {"session_hours": 48, "operator_session_hours": 2}
    async with plane_on(databases, tmp_path, clock=lambda: now[0], **hours) as plane:
        made = await new_tenant(plane)
        async with client_of(plane, made["key"]) as ada:
            ends = (now[0] + timedelta(hours=24)).isoformat()
            short = await ada.post("/api/keys", json={"name": "short", "expires_at": ends})
        async with browser_at(plane) as browser, browser_at(plane) as other:
            await browser.sign_in(made["key"])
            found = await browser.sign_in(ADMIN_KEY)
            assert found["expires_at"].startswith((now[0] + timedelta(hours=2)).isoformat()[:19])
            await other.sign_in(short.json()["key"])
            for passed, kinds, others in (
                (1, ["operator", "customer"], ["customer"]),
                (3, ["customer"], ["customer"]),
                (25, ["customer"], []),
                (49, [], []),
            ):
                # The jar keeps them: a browser would have dropped them by now.
                begun = now[0]
                now[0] += timedelta(hours=passed)
                assert (await browser.who())["kinds"] == kinds
                assert (await other.who())["kinds"] == others
                now[0] = begun
            now[0] += timedelta(hours=49)
            assert (await browser.call("GET", "/api/wallet")).status_code == 401
            await browser.sign_in(ADMIN_KEY)
        async with plane.central.read() as tx:
            assert await tx.scalar(select(func.count()).select_from(sessions_table)) == 1


async def test_a_key_has_so_many_sessions_and_the_oldest_ends(plane: ControlPlane) -> None:
    made = await new_tenant(plane)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(browser_at(plane))
        await first.sign_in(made["key"])
        for _ in range(SESSIONS_PER_KEY_MAX):
            assert (await first.who())["signed_in"] is True
            other = await stack.enter_async_context(browser_at(plane))
            await other.sign_in(made["key"])
        assert (await first.who())["signed_in"] is False
        assert (await other.who())["signed_in"] is True


async def test_wrong_keys_are_slowed_down_and_strange_ones_are_told(plane: ControlPlane) -> None:
    waited: list[float] = []

    async def wait(seconds: float) -> None:
        waited.append(seconds)

    revoked = await new_operator(plane, "owner")
    async with browser_at(plane) as browser, client_of(plane) as admin:
        await admin.post("/api/admin/operators/grace/revoke")
        browser.app.state.wrong_keys = WrongKeyThrottle(wait)
        strange = ["cf_" + "0" * 64, "cfo_" + "0" * 64, "ключ", revoked, "x" * 500]
        for number in range(FREE_TRIES + 3):
            body = {"key": strange[number % len(strange)]}
            refused = await browser.client.post("/api/session", json=body)
            assert refused.status_code == 401
            assert "set-cookie" not in refused.headers
        assert len(waited) == 3
        bad: list[dict[str, Any]] = [
            {},
            {"key": ""},
            {"key": "x" * 501},
            {"key": 7},
            {"key": "a\0"},
            {"key": "\ud800"},
        ]
        for body in bad:
            content = json.dumps(body)
            headers = {"Content-Type": "application/json"}
            refused = await browser.client.post("/api/session", content=content, headers=headers)
            assert refused.status_code == 422, body
        large = await browser.client.post("/api/session", content=b" " * 70_000)
        assert large.status_code == 413


async def test_neither_secret_nor_token_nor_key_is_in_a_log_a_metric_or_the_audit(
    plane: ControlPlane, caplog: pytest.LogCaptureFixture
) -> None:
    made = await new_tenant(plane)
    with caplog.at_level(logging.DEBUG):
        async with browser_at(plane) as browser, client_of(plane) as admin:
            await browser.sign_in(made["key"])
            secret = str(browser.secret)
            await browser.call("GET", "/api/wallet")
            await browser.call("POST", "/api/keys", json={"name": 7})
            await browser.client.post("/api/keys", json={"name": "a"})
            await browser.client.get(f"/nowhere/{uuid4()}")
            await browser.sign_out()
            audit = (await admin.get("/api/admin/audit")).text
            metrics = (await browser.client.get("/metrics")).text
    said = caplog.text + metrics + audit
    assert "/api/session" in caplog.text
    assert "sign_out" in audit
    for each in (secret, csrf_token(secret), made["key"]):
        assert each not in said


async def test_a_stream_ends_with_the_sign_in_that_opened_it(plane: ControlPlane) -> None:
    made = await new_tenant(plane)
    async with browser_at(plane) as browser:
        await browser.sign_in(made["key"])
        async with plane.central.read() as tx:
            found = await sessions.find_session(
                tx,
                str(browser.secret),
                admin_key_hash=plane.admin_key.key_hash,
                now=plane.clock(),
            )
        assert found is not None
        caller = found.customer
        assert caller is not None

        async def is_valid() -> bool:
            async with plane.central.read() as tx:
                return await sessions.is_caller_valid(tx, caller, now=plane.clock())

        assert await is_valid()
        await browser.sign_in(ADMIN_KEY)
        assert await is_valid(), "who signs in as somebody else, too, keeps streams open"
        other = await new_tenant(plane, "Grace")
        await browser.sign_in(other["key"])
        assert not await is_valid()
        async with plane.central.transaction() as tx:
            key = await tenants.authenticate_key(tx, made["key"], now=plane.clock())
            assert await sessions.is_caller_valid(tx, key, now=plane.clock())


async def test_an_erased_tenants_sessions_are_gone(plane: ControlPlane) -> None:
    made = await new_tenant(plane)
    async with browser_at(plane) as browser:
        await browser.sign_in(made["key"])
        async with plane.central.transaction() as tx:
            await tenants.delete_keys_of(tx, UUID(made["id"]))
        async with plane.central.read() as tx:
            assert (await tx.execute(text("SELECT count(*) FROM sessions"))).scalar() == 0


async def test_the_editor_and_the_pages_have_one_sign_in(plane: ControlPlane) -> None:
    made = await new_tenant(plane)
    async with browser_at(plane) as browser:
        await browser.sign_in(made["key"])
        own = {"Origin": URL}
        assert (await browser.client.get("/queue")).status_code == 200
        assert (await browser.client.get("/editor/api/queue")).status_code == 200
        cleared = await browser.client.get("/editor/")
        assert "localStorage.clear()" in cleared.text, "drafts of whoever was here before"
        assert "localStorage.clear()" not in (await browser.client.get("/editor/")).text
        assert (
            await browser.client.post("/queue", json={"clear": True}, headers=own)
        ).status_code == 200
        for foreign in FOREIGN:
            refused = await browser.client.post("/queue", json={"clear": True}, headers=foreign)
            assert refused.status_code == 403
        assert (await browser.client.post("/editor/logout", headers=own)).status_code == 200
        assert (await browser.who())["signed_in"] is False
        login = await browser.client.post("/editor/login", data={"key": made["key"]}, headers=own)
        assert login.status_code in (200, 303)
        assert (await browser.who())["kinds"] == ["customer"]
        assert (await browser.call("GET", "/api/wallet")).status_code == 200


async def test_an_operators_sign_in_is_nobody_to_comfyuis_api(plane: ControlPlane) -> None:
    async with browser_at(plane) as browser:
        await browser.sign_in(ADMIN_KEY)
        assert (await browser.client.get("/queue")).status_code == 401
