"""What commands say of a control plane that refuses, is none, or is not there; over real sockets."""

import json
from collections.abc import Iterator

import pytest
from tests.support.server.commands import Admin, comfyfleet
from tests.support.server.ports import free_port
from tests.support.server.small_http import Answer, SmallServer, serving

BASE = "/api/admin"
NOT_FOUND = {"error": {"code": "not_found", "message": "workflow negativ was not found"}}
BUSY = {"error": {"code": "unavailable", "message": "the database is away"}}


def refused(body: object, status: int, **headers: str) -> Answer:
    return Answer(json.dumps(body).encode(), status, headers=headers)


@pytest.fixture
def small() -> Iterator[SmallServer]:
    with serving({}, "GET", "POST") as server:
        yield server


@pytest.fixture
def admin(small: SmallServer) -> Admin:
    return Admin(small.url, "a-key")


def test_nobody_answers_and_the_reason_and_a_hint_are_told() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = Admin(url, "a-key")("workflows", "list")
    assert result.code == 1
    assert result.lines == [
        f"error: no control plane responds at {url}: connection refused",
        "hint: Is it running? Start one with comfyfleet up, or set COMFYFLEET_URL to its address.",
    ]


def test_a_server_of_something_else_is_told_with_what_it_said(
    small: SmallServer, admin: Admin
) -> None:
    small.answers[f"{BASE}/fleets"] = Answer(b"<html>hello", content_type="text/html")
    for command in ("workflows", "fleets"):
        result = admin(command, "list")
        assert result.code == 1
        assert result.lines[0].startswith(
            f"error: {small.url} isn't a control plane: it responded "
        )
        assert "COMFYFLEET_URL must be the address" in result.lines[1]


def test_a_prefix_of_the_address_is_kept(small: SmallServer) -> None:
    small.answers[f"/fleet{BASE}/fleets"] = Answer(b'{"fleets": []}')
    result = Admin(f"{small.url}/fleet/", "a-key")("fleets", "list")
    assert result.code == 0, result.err
    assert (
        Admin(f"{small.url}/nofleet", "k")("fleets", "list")
        .lines[0]
        .startswith(f"error: {small.url}/nofleet isn't a control plane")
    )


def test_a_refusal_is_not_repeated_and_says_when_to_come_again(
    small: SmallServer, admin: Admin
) -> None:
    small.answers[f"{BASE}/fleets"] = refused(BUSY, 503, **{"Retry-After": "7"})
    result = admin("fleets", "list")
    assert (result.code, small.asked[f"{BASE}/fleets"]) == (1, 1)
    assert result.lines == ["error: the database is away", "hint: Try again in 7 s."]


WORK = f"{BASE}/tenants/t1/work/graph_run/r1/stop"


def test_an_unknown_run_of_a_tenant_keeps_the_servers_hint(
    small: SmallServer, admin: Admin
) -> None:
    hint = "List the tenant's work with: comfyfleet admin tenants work list t1"
    message = "graph run r1 was not found"
    error = {"code": "not_found", "message": message, "details": {"hint": hint}}
    small.answers[WORK] = refused({"error": error}, 404)
    small.answers[f"{BASE}/tenants"] = Answer(b'{"tenants": [{"id": "t1", "name": "Ada"}]}')
    result = admin("tenants", "work", "stop", "t1", "--kind", "graph_run", "--id", "r1")
    assert result.lines == [f"error: {message}", f"hint: {hint}"]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("cancelled", "is now cancelled"),
        ("completed", "had already completed; nothing was changed"),
        ("failed", "had already failed; nothing was changed"),
    ],
)
def test_stopping_a_run_that_has_ended_says_that_nothing_was_changed(
    small: SmallServer, admin: Admin, status: str, said: str
) -> None:
    small.answers[WORK] = Answer(json.dumps({"status": status}).encode())
    result = admin("tenants", "work", "stop", "t1", "--kind", "graph_run", "--id", "r1")
    assert result.code == 0, result.err
    assert f"graph_run r1 {said}" in result.lines


def test_a_key_that_is_refused_or_missing_is_told_which_one_it_must_be(
    small: SmallServer, admin: Admin
) -> None:
    denied = {"error": {"code": "unauthenticated", "message": "the key is unknown"}}
    small.answers[f"{BASE}/fleets"] = refused(denied, 401)
    assert "COMFYFLEET_KEY must be an operator's" in admin("fleets", "list").lines[1]
    none = comfyfleet("admin", "fleets", "list")
    assert (none.code, none.lines[0]) == (1, "error: COMFYFLEET_KEY is not set")


def test_what_is_not_there_is_told_with_what_is_and_if_that_fails_without(
    small: SmallServer, admin: Admin
) -> None:
    small.answers[f"{BASE}/workflows/negativ"] = refused(NOT_FOUND, 404)
    assert admin("workflows", "show", "negativ").lines == ["error: workflow negativ was not found"]
    small.answers[f"{BASE}/workflows"] = Answer(b'{"workflows": [{"slug": "negative"}]}')
    assert admin("workflows", "show", "negativ").lines[1] == "hint: Did you mean: negative?"


def test_json_is_the_answer_with_fields_that_this_version_does_not_know(
    small: SmallServer, admin: Admin
) -> None:
    answer = {"newer": {"z": 1, "a": [None]}, "fleets": []}
    small.answers[f"{BASE}/fleets"] = Answer(json.dumps(answer).encode())
    result = admin("fleets", "list", "--json")
    assert (result.json, list(result.json)) == (answer, ["newer", "fleets"])


def test_lines_of_a_long_answer_end_with_a_newline_only(small: SmallServer, admin: Admin) -> None:
    lines = '{"a": "x\u2028y"}\n{"b": 2}\n'
    small.answers[f"{BASE}/audit/export"] = Answer(lines.encode())
    assert admin("audit", "--export").out == lines
    small.answers[f"{BASE}/audit/export"] = refused(BUSY, 503)
    assert admin("audit", "--export").lines == ["error: the database is away"]


def test_what_is_missing_is_not_mistaken_for_what_the_address_names(
    small: SmallServer, admin: Admin
) -> None:
    small.answers[f"{BASE}/workflows/negativ"] = refused(
        {"error": {**NOT_FOUND["error"], "message": "fleet gpu/production was not found"}}, 404
    )
    small.answers[f"{BASE}/workflows"] = Answer(b'{"workflows": [{"slug": "negative"}]}')
    assert admin("workflows", "show", "negativ").lines == [
        "error: fleet gpu/production was not found"
    ]
