"""Sign-in by an identity provider: who becomes whom, and which of its answers are not believed."""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import UUID

import httpx
import pytest
from joserfc.jwk import RSAKey
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import URL, client_of, plane_on
from tests.support.server.identity_provider import (
    CLIENT_ID,
    CLIENT_SECRET,
    IdentityProvider,
    serving_identity_provider,
)
from tests.support.server.sessions import BrowserClient, browser_at

from comfyfleet.errors import InvalidInput, ServerUnavailable
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.db import Tx
from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.oidc import COOKIE, OidcProvider, SignInFlow, safe_path
from comfyfleet.server.http.sessions import COOKIE as SESSION_COOKIE
from comfyfleet.server.tenants import identities
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.model import DEFAULT_TENANT
from comfyfleet.settings import Settings, parse_claim_rules

RULES = {
    "oidc_tenants": f"groups:films={DEFAULT_TENANT}",
    "oidc_roles": "groups:ops=operator,realm.roles:boss=owner,groups:look=viewer,email:ada@x.test=viewer",
}


@dataclass
class Stage:
    plane: ControlPlane
    provider: IdentityProvider
    stack: AsyncExitStack

    async def browser(self) -> BrowserClient:
        return await self.stack.enter_async_context(browser_at(self.plane))

    async def signed_in(self, **claims: Any) -> dict[str, Any]:
        self.provider.claims = {"sub": "ada", **claims}
        browser = await self.browser()
        answer = await back(browser, await there(browser))
        assert answer.headers["location"] == "/", answer.headers["location"]
        return await browser.who()

    async def refused(self) -> str:
        """What the sign-in page is told."""
        browser = await self.browser()
        answer = await back(browser, await there(browser))
        assert (await browser.who())["signed_in"] is False
        return problem_of(answer)


async def test_an_identity_provider_that_is_away_is_named_with_its_address() -> None:
    settings = Settings(oidc_issuer="http://127.0.0.1:1", oidc_client_id=CLIENT_ID)
    with pytest.raises(ServerUnavailable, match=r"at http://127\.0\.0\.1:1: connection refused"):
        await OidcProvider(settings).authorization_url(SignInFlow("verifier", "/"))


@pytest.fixture
async def stage(databases: Databases, tmp_path: Path) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(serving_identity_provider())
        settings: dict[str, Any] = {
            "oidc_issuer": provider.url,
            "oidc_client_id": CLIENT_ID,
            "oidc_client_secret": CLIENT_SECRET,
            "oidc_name": "Films Inc.",
            **RULES,
        }
        plane = await stack.enter_async_context(plane_on(databases, tmp_path, **settings))
        yield Stage(plane, provider, stack)


async def there(browser: BrowserClient, next_page: str | None = None) -> str:
    """To the provider, and the address by which it leads back."""
    query = {"next": next_page} if next_page is not None else {}
    begun = await browser.client.get("/auth/oidc/start", params=query)
    assert begun.status_code == 303
    async with httpx.AsyncClient() as outside:
        answer = await outside.get(begun.headers["location"])
    address = answer.headers["location"]
    assert address.startswith(f"{URL}/auth/oidc/callback?")
    return str(address)


async def back(browser: BrowserClient, address: str) -> httpx.Response:
    answer = await browser.client.get(address, headers={"Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 303, answer.text
    return answer


def problem_of(answer: httpx.Response) -> str:
    found = urlsplit(answer.headers["location"])
    assert (found.scheme, found.netloc, found.path) == ("", "", "/sign-in")
    return parse_qs(found.query)["problem"][0]


async def test_claims_make_a_tenants_user_and_an_operator(stage: Stage) -> None:
    found = await stage.signed_in(groups=["films", "ops"], name="Ada", email="ada@films.test")
    assert found["kinds"] == ["operator", "customer"]
    assert found["tenant"]["id"] == str(DEFAULT_TENANT)
    # An address that the provider has not verified may be anybody's.
    assert found["user"] | {"id": None} == {"id": None, "name": "Ada", "email": None}
    assert (found["operator"], found["role"]) == ("operator:ada", "operator")
    assert (found["ways"]["oidc"], found["ways"]["oidc_name"]) == (True, "Films Inc.")
    again = await stage.signed_in(groups=["films"], realm={"roles": ["boss"]})
    assert again["user"]["id"] == found["user"]["id"]
    assert (again["operator"], again["role"]) == ("operator:ada", "owner")
    other = await stage.signed_in(sub="grace", groups=["films"])
    assert other["kinds"] == ["customer"]
    assert other["user"]["id"] != found["user"]["id"]
    async with client_of(stage.plane) as admin:
        audit = (await admin.get("/api/admin/audit?actor=oidc")).json()["entries"]
    assert [each["action"] for each in audit] == ["change_operator", "add_operator"]


async def test_a_verified_address_is_the_user_who_has_it(stage: Stage) -> None:
    users = f"/api/admin/tenants/{DEFAULT_TENANT}/users"
    async with client_of(stage.plane) as admin:
        made = (await admin.post(users, json={"email": "ada@x.test"})).json()
        found = await stage.signed_in(groups=["films"], email="Ada@X.test", email_verified=True)
        assert found["user"]["id"] == made["id"]
        assert found["role"] == "viewer"
        thief = await stage.signed_in(sub="eve", groups=["films"], email="ada@x.test")
        assert thief["user"]["id"] != made["id"]
        assert thief["role"] is None
        assert (await admin.post(f"{users}/{made['id']}/deactivate")).status_code == 200
        stage.provider.claims = {
            "sub": "ada",
            "groups": ["films"],
            "email": "ada@x.test",
            "email_verified": True,
        }
        assert await stage.refused() == "forbidden"


async def test_nothing_stays_of_whoever_used_the_browser_before(stage: Stage) -> None:
    """The provider says all that a person is: neither another one's rights stay, nor those that one had once."""
    browser = await stage.browser()
    stage.provider.claims = {"sub": "ada", "groups": ["films", "ops"]}
    await back(browser, await there(browser))
    assert (await browser.who())["kinds"] == ["operator", "customer"]
    before = browser.secret
    stage.provider.claims = {"sub": "eve", "groups": ["films"]}
    await back(browser, await there(browser))
    found = await browser.who()
    assert (found["kinds"], found["operator"]) == (["customer"], None)
    assert (await browser.call("GET", "/api/admin/tenants")).status_code == 401
    thief = await stage.browser()
    thief.client.cookies.set(SESSION_COOKIE, str(before), domain="control.test")
    assert (await thief.who())["signed_in"] is False


async def test_who_signs_in_while_being_deactivated_keeps_no_session(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_id = UUID((await stage.signed_in(groups=["films"]))["user"]["id"])
    path = f"/api/admin/tenants/{DEFAULT_TENANT}/users/{user_id}"
    revoke_all_keys, seen = tenants.revoke_all_keys, list[bool]()

    async def revoke_when_nobody_gets_in(tx: Tx, *given: Any, **named: Any) -> Any:
        pool = await stage.plane.context.pool_of(DEFAULT_TENANT)
        async with pool.read() as other:
            seen.append((await tenants.get_user(other, DEFAULT_TENANT, user_id)).is_active)
        return await revoke_all_keys(tx, *given, **named)

    monkeypatch.setattr(tenants, "revoke_all_keys", revoke_when_nobody_gets_in)
    ensure_user = identities.ensure_user

    async def deactivated_after_it(tx: Tx, *given: Any, **named: Any) -> Any:
        user = await ensure_user(tx, *given, **named)
        await tenants.set_user_active(tx, DEFAULT_TENANT, user_id, is_active=False)
        return user

    async with client_of(stage.plane) as admin:
        assert (await admin.post(f"{path}/deactivate")).status_code == 200
        assert seen == [False]
        assert (await admin.post(f"{path}/activate")).status_code == 200
    monkeypatch.setattr(identities, "ensure_user", deactivated_after_it)
    assert await stage.refused() == "forbidden"


async def test_who_is_in_no_rule_is_nobody_and_a_revoked_operator_stays_out(stage: Stage) -> None:
    stage.provider.claims = {"sub": "ada", "groups": ["others"]}
    assert await stage.refused() == "forbidden"
    await stage.signed_in(groups=["look"])
    async with client_of(stage.plane) as admin:
        await admin.post("/api/admin/operators/ada/revoke")
    stage.provider.claims = {"sub": "ada", "groups": ["ops"]}
    assert await stage.refused() == "forbidden"


async def test_an_operators_name_that_is_taken_is_not_theirs(stage: Stage) -> None:
    async with client_of(stage.plane) as admin:
        await admin.post("/api/admin/operators", json={"name": "ada", "role": "owner"})
    found = await stage.signed_in(groups=["look"])
    assert found["operator"].startswith("operator:ada-")
    assert found["role"] == "viewer"


async def test_the_way_back_is_open_to_the_browser_that_began_it_only_and_once(
    stage: Stage,
) -> None:
    stage.provider.claims = {"sub": "ada", "groups": ["films"]}
    mine, other = await stage.browser(), await stage.browser()
    address = await there(mine)
    assert problem_of(await back(other, address)) == "unauthenticated"
    await there(other)
    assert problem_of(await back(other, address)) == "unauthenticated"
    kept = mine.client.cookies.get(COOKIE)
    assert (await back(mine, address)).headers["location"] == "/"
    assert mine.client.cookies.get(COOKIE) is None
    other.client.cookies.clear()
    other.client.cookies.set(COOKIE, str(kept), domain="control.test")
    assert problem_of(await back(other, address)) == "unauthenticated", "the code was used"


WRONG_TOKENS: list[dict[str, Any]] = [
    {"iss": "https://evil.example"},
    {"aud": "another client"},
    {"aud": [CLIENT_ID, "another client"]},
    {"azp": "another client"},
    {"nonce": "of another sign-in"},
    {"nonce": None},
    {"exp": int(time.time()) - 3600},
    {"exp": None},
    {"iat": None},
    {"sub": None},
    {"nbf": int(time.time()) + 3600},
]


async def test_a_token_that_says_something_else_is_not_believed(stage: Stage) -> None:
    stage.provider.claims = {"sub": "ada", "groups": ["films"]}
    for changes in WRONG_TOKENS:
        stage.provider.changes = changes
        assert await stage.refused() == "unauthenticated", changes
    stage.provider.changes = {}
    assert (await stage.signed_in(groups=["films"]))["signed_in"] is True


async def test_a_token_of_another_key_is_not_believed(stage: Stage) -> None:
    provider = stage.provider
    provider.claims = {"sub": "ada", "groups": ["films"]}
    provider.signs_with = RSAKey.generate_key(2048, {"kid": "1"})
    assert await stage.refused() == "unauthenticated"
    # The public key, or the client's secret, as a secret that both know.
    for algorithm, secret in (
        ("HS256", provider.key.as_pem(private=False)),
        ("HS256", CLIENT_SECRET.encode()),
        ("none", b""),
    ):
        provider.algorithm, provider.signs_with = algorithm, secret
        assert await stage.refused() == "unauthenticated"


async def test_new_keys_of_the_provider_are_found_but_not_looked_for_all_the_time(
    stage: Stage,
) -> None:
    await stage.signed_in(groups=["films"])
    app = create_app(stage.plane)
    now = [0.0]
    app.state.oidc._clock = lambda: now[0]
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
        browser = BrowserClient(client, app)
        assert (await back(browser, await there(browser))).headers["location"] == "/"
        stage.provider.key = RSAKey.generate_key(2048, {"kid": "2"})
        stage.provider.asked.clear()
        assert problem_of(await back(browser, await there(browser))) == "unauthenticated"
        assert stage.provider.asked == ["token"]
        now[0] = 61.0
        assert (await back(browser, await there(browser))).headers["location"] == "/"
        assert stage.provider.asked == ["token", "token", "jwks"]


async def test_a_provider_that_is_another_or_away_lets_nobody_in(stage: Stage) -> None:
    for metadata in (
        {"issuer": "https://evil.example"},
        {"token_endpoint": "http://evil.example/token"},
        {"jwks_uri": None},
        {"authorization_endpoint": "javascript:alert(1)"},
        {"filling": "x" * 2_000_000},
    ):
        stage.provider.metadata = metadata
        browser = await stage.browser()
        assert problem_of(await browser.client.get("/auth/oidc/start")) == "unexpected_answer"
        assert browser.client.cookies.get(COOKIE) is None


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("/console?tab=1", "/console?tab=1"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("https://evil.example", "/"),
        ("javascript:alert(1)", "/"),
        ("/\t/evil.example", "/"),
        ("/a\nSet-Cookie: x=1", "/"),
        ("/a\\..\\b", "/"),
        ("", "/"),
        ("/" + "a" * 500, "/"),
    ],
)
def test_only_a_page_of_ours_follows(wanted: str, found: str) -> None:
    assert safe_path(wanted) == found


async def test_the_page_that_was_asked_for_follows_and_no_other_site(stage: Stage) -> None:
    stage.provider.claims = {"sub": "ada", "groups": ["films"]}
    for wanted, found in (("/effects/soft?x=1", "/effects/soft?x=1"), ("//evil.example/", "/")):
        browser = await stage.browser()
        answer = await back(browser, await there(browser, wanted))
        assert answer.headers["location"] == found


async def test_without_a_provider_there_is_no_such_way(
    sqlite_databases: Databases, tmp_path: Path
) -> None:
    async with plane_on(sqlite_databases, tmp_path) as plane, browser_at(plane) as browser:
        assert (await browser.who())["ways"]["oidc"] is False
        for path in ("start", "callback"):
            assert (await browser.client.get(f"/auth/oidc/{path}")).status_code == 404


@pytest.mark.parametrize(
    "settings",
    [
        {"oidc_issuer": "http://idp.example"},
        {"oidc_issuer": "idp.example"},
        {"oidc_client_id": ""},
        {"oidc_roles": "groups:ops=emperor"},
        {"oidc_roles": "ops=owner"},
        {"oidc_tenants": "*=films"},
        {"oidc_tenants": "groups:=x"},
    ],
)
async def test_settings_that_could_never_work_are_told_at_the_start(
    sqlite_databases: Databases, tmp_path: Path, settings: dict[str, str]
) -> None:
    given: dict[str, Any] = {
        "oidc_issuer": "https://idp.example",
        "oidc_client_id": "fleet",
        **settings,
    }
    with pytest.raises(InvalidInput):
        async with plane_on(sqlite_databases, tmp_path, **given) as plane:
            create_app(plane)


def test_rules_are_read_as_they_are_written() -> None:
    rules = parse_claim_rules("https://x.test/roles:a=1, *=2,", "X")
    assert [(each.claim, each.value, each.target) for each in rules] == [
        ("https://x.test/roles", "a", "1"),
        ("", "*", "2"),
    ]


async def test_codes_and_secrets_are_in_no_log(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG"):
        await stage.signed_in(groups=["films"])
        stage.provider.changes = {"aud": "x"}
        await stage.refused()
    assert "/auth/oidc/callback" in caplog.text
    for each in ("code-0", CLIENT_SECRET, "state=", "nonce="):
        assert each not in "".join(
            record.getMessage() for record in caplog.records if record.name.startswith("comfyfleet")
        )
