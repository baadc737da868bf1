"""No call of a ComfyUI client keeps the others waiting, however large it is: up to its limit it is served while the
loop turns, and above the limit it is refused before the work starts."""

import json
import threading
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.gateway import GatewayInProcess, GatewayUser, gateway_on
from tests.support.server.loop_stalls import LoopStalls
from tests.support.server.outside import RawAnswer, raw_request, send_from_outside

from comfyfleet.api.sizes import SMALL_VALUES_MAX
from comfyfleet.server.gateway import history, prompts, userdata
from comfyfleet.server.gateway import store as userdata_store
from comfyfleet.server.gateway.placement import PromptMatch, match_prompt
from comfyfleet.server.http.gateway.prompts import IDS_MAX
from comfyfleet.server.http.gateway.userdata import LISTED_MAX

VALUES_OF_ONE_NODE = 14  # of a prompt of one node and its preview that have no other inputs
PREVIEW = {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}}
EMPTY = {"width": 8, "height": 8, "batch_size": 1, "color": 0}


@pytest.fixture
async def server(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[GatewayInProcess]:
    """Its worker takes no jobs: what that does with a prompt is no work of the control plane."""
    async with gateway_on(sqlite_databases, tmp_path) as server:
        headers = {"Authorization": f"Bearer {server.admin_key}"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers) as admin:
            answer = await admin.post("/api/admin/maintenance", json={"on": True})
            assert answer.status_code == 200, answer.text
        yield server


@pytest.fixture
async def user(server: GatewayInProcess) -> GatewayUser:
    return await server.new_user()


async def attack(
    user: GatewayUser, requests: Sequence[tuple[str, str, Any]], *, at_once: int = 1
) -> list[RawAnswer]:
    """Sends (method, path, body) and returns the answers."""
    raw = [
        raw_request(method, path, key=user.key, body=_bytes(body))
        for method, path, body in requests
    ]
    async with LoopStalls(", ".join(f"{method} {path}" for method, path, _ in requests)):
        return await send_from_outside(user.url, raw, at_once=at_once)


def _bytes(body: Any) -> bytes:
    if body is None or isinstance(body, bytes):
        return body or b""
    return json.dumps(body, separators=(",", ":")).encode()


def prompt_of(values: int, *, nodes: int = 1, color: int = 0) -> dict[str, Any]:
    """A prompt with so many values, mostly inputs that its nodes don't declare."""
    # The prompt itself; of a node: itself, its class, its inputs; the link of the preview and its two parts.
    left = values - 1 - 3 * (nodes + 1) - len(EMPTY) * nodes - 3
    each = [left // nodes + (number < left % nodes) for number in range(nodes)]
    made: dict[str, Any] = {
        str(number + 1): {
            "class_type": "EmptyImage",
            "inputs": {**EMPTY, "color": color, **{f"x{at}": at for at in range(each[number])}},
        }
        for number in range(nodes)
    }
    return {**made, "preview": PREVIEW}


def of_bytes(size: int, values: int = prompts.EXTRA_VALUES_MAX) -> dict[str, Any]:
    """An object that has so many bytes as JSON, and so many values."""
    made = {"x": [0] * (values - 3), "y": ""}
    return {**made, "y": "z" * (size - len(_bytes(made)))}


async def test_a_prompt_may_have_50_000_values(user: GatewayUser) -> None:
    for nodes in (1, 1_900):
        body = {"prompt": prompt_of(prompts.VALUES_MAX, nodes=nodes)}
        (answer,) = await attack(user, [("POST", "/prompt", body)])
        assert answer.status == 200, answer.raw[-500:]


async def test_prompts_of_more_than_2_000_values_are_matched_in_threads(
    user: GatewayUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_loop: list[bool] = []

    def noted(*arguments: Any) -> PromptMatch:
        in_loop.append(threading.current_thread() is threading.main_thread())
        return match_prompt(*arguments)

    monkeypatch.setattr(prompts, "match_prompt", noted)
    for values in (SMALL_VALUES_MAX, SMALL_VALUES_MAX + 1):
        body = {"prompt": prompt_of(values)}
        (answer,) = await attack(user, [("POST", "/prompt", body)])
        assert answer.status == 200, answer.raw[-500:]
    assert in_loop == [True, False]


@pytest.mark.parametrize("values", [prompts.VALUES_MAX + 1, 150_000])
async def test_a_prompt_with_more_values_is_refused(user: GatewayUser, values: int) -> None:
    (answer,) = await attack(user, [("POST", "/prompt", {"prompt": prompt_of(values)})])
    assert answer.status == 400
    assert answer.json()["error"]["message"] == "The prompt has more than 50,000 values"


async def register(server: GatewayInProcess, **prices: int) -> None:
    """Registers workflows of one shape, which differ in their values."""
    headers = {"Authorization": f"Bearer {server.admin_key}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers) as admin:
        for color, (slug, price) in enumerate(prices.items()):
            document = prompt_of(VALUES_OF_ONE_NODE, color=color)
            new = {"slug": slug, "document": document, "price_tokens": price}
            answer = await admin.post("/api/admin/workflows", json=new)
            assert answer.is_success, answer.text
        path = "/api/admin/fleets/default/production/workflows"
        answer = await admin.put(path, json={"workflow_slugs": list(prices)})
        assert answer.is_success, answer.text
    server.plane.context.caches.gateway.clear()  # kept for two seconds


def star_of(nodes: int) -> dict[str, Any]:
    """A node that takes from all others, in inputs that it doesn't declare, and comes first."""
    links = {f"x{number}": [str(number), 0] for number in range(1, nodes)}
    star = {**PREVIEW, "inputs": {"images": ["1", 0], **links}}
    others = {
        str(number): {"class_type": "EmptyImage", "inputs": EMPTY} for number in range(1, nodes)
    }
    return {"preview": star, **others}


async def test_prompts_are_compared_with_workflows_while_the_loop_turns(
    server: GatewayInProcess,
) -> None:
    await register(server, black=2, blue=3)
    user = await server.new_user(tokens=100)
    for prompt, price in (
        (prompt_of(prompts.VALUES_MAX), 2),
        (prompt_of(prompts.VALUES_MAX, color=1), 3),
        (star_of(2_000), 3),
    ):
        balance = await balance_of(user)
        (answer,) = await attack(user, [("POST", "/prompt", {"prompt": prompt})])
        assert answer.status == 200, answer.raw[-500:]
        assert balance - await balance_of(user) >= price


async def balance_of(user: GatewayUser) -> int:
    async with user.http_async() as http:
        found: int = (await http.get("/api/wallet")).json()["balance"]
    return found


async def test_extra_data_may_have_512_kib(user: GatewayUser) -> None:
    for values in (3, prompts.EXTRA_VALUES_MAX):
        extra_data = of_bytes(prompts.EXTRA_BYTES_MAX, values)
        assert len(_bytes(extra_data)) == prompts.EXTRA_BYTES_MAX
        body = {"prompt": prompt_of(50), "extra_data": extra_data}
        (answer,) = await attack(user, [("POST", "/prompt", body)])
        assert answer.status == 200, answer.raw[-500:]


@pytest.mark.parametrize("size", [prompts.EXTRA_BYTES_MAX + 1, 3_900_000])
async def test_larger_extra_data_is_refused(user: GatewayUser, size: int) -> None:
    body = {"prompt": prompt_of(50), "extra_data": of_bytes(size)}
    (answer,) = await attack(user, [("POST", "/prompt", body)])
    assert answer.status == 400
    error = answer.json()["error"]
    assert error["message"] == "extra_data is too large"
    assert f"{prompts.EXTRA_BYTES_MAX:,}" in error["details"]


@pytest.mark.parametrize("values", [prompts.EXTRA_VALUES_MAX + 1, 190_000])
async def test_extra_data_with_more_values_is_refused(user: GatewayUser, values: int) -> None:
    extra_data = of_bytes(prompts.EXTRA_BYTES_MAX, values)
    body = {"prompt": prompt_of(50), "extra_data": extra_data}
    (answer,) = await attack(user, [("POST", "/prompt", body)])
    assert answer.status == 400
    error = answer.json()["error"]
    assert error["message"] == "extra_data is too large"
    assert f"{prompts.EXTRA_VALUES_MAX:,} values" in error["details"]


async def large_history(server: GatewayInProcess, user: GatewayUser, count: int) -> list[str]:
    """As large as prompts may be; they have ended, and are in the history."""
    ids = []
    async with user.http_async() as http:
        for number in range(count):
            extra_data = of_bytes(prompts.EXTRA_BYTES_MAX)
            prompt = prompt_of(prompts.VALUES_MAX, color=number)
            body = _bytes({"prompt": prompt, "extra_data": extra_data})
            answer = await http.post("/prompt", content=body)
            assert answer.status_code == 200, answer.text
            ids.append(answer.json()["prompt_id"])
            gone = await http.post(f"/api/v2/jobs/{ids[-1]}/cancel")
            assert gone.status_code == 200, gone.text
    return ids


@pytest.mark.parametrize(
    "path", ["/history", "/api/jobs", "/api/v2/jobs", "/api/v2/jobs?limit=100"]
)
async def test_a_history_of_large_prompts_is_read_in_parts(
    server: GatewayInProcess, user: GatewayUser, path: str
) -> None:
    ids = await large_history(server, user, 12)
    server.plane.context.notifier.tell_user(user.user_id)
    (answer,) = await attack(user, [("GET", path, None)])
    assert answer.status == 200
    assert len(answer.body) <= history.BODY_BYTES_MAX + 1000
    if path == "/history":
        shown = list(answer.json())
        assert shown == ids[-len(shown) :]
        assert 3 <= len(shown) < len(ids)
    else:
        assert len(answer.json()["jobs"]) == len(ids)


async def test_a_queue_of_large_prompts_lists_all_of_them(
    server: GatewayInProcess, user: GatewayUser
) -> None:
    ids = []
    async with user.http_async() as http:
        for number in range(18):
            body = _bytes({"prompt": prompt_of(prompts.VALUES_MAX // 2, color=number)})
            ids.append((await http.post("/prompt", content=body)).json()["prompt_id"])
    (answer,) = await attack(user, [("GET", "/queue", None)])
    rows = answer.json()["queue_pending"]
    assert {row[1] for row in rows} == set(ids)
    assert any(row[2] for row in rows)
    assert not all(row[2] for row in rows)
    for path, clears in (("/interrupt", {}), ("/queue", {"clear": True})):
        await attack(user, [("POST", path, clears)])


async def put_files(server: GatewayInProcess, user: GatewayUser, paths: Sequence[str]) -> None:
    now = server.plane.clock() - timedelta(hours=1)
    async with server.plane.context.tenant_transaction(user.tenant_id) as tx:
        for path in paths:
            row = {"tenant_id": user.tenant_id, "user_id": user.user_id, "path": path}
            times = {"created_at": now, "modified_at": now}
            await userdata_store.add(tx, {**row, **times, "data": b"{}", "size": 2})


TREE, SPLIT = "/v2/userdata", "/userdata?dir=.&recurse=true&split=true"


@pytest.mark.parametrize("path", [TREE, SPLIT, f"{SPLIT}&full_info=true"])
async def test_a_tree_within_the_limit_is_listed(
    server: GatewayInProcess, user: GatewayUser, path: str
) -> None:
    files = [f"folder-{number}/workflow.json" for number in range(userdata.FILES_MAX)]
    await put_files(server, user, files)
    (answer,) = await attack(user, [("GET", path, None)])
    assert answer.status == 200
    assert len(answer.json()) == (LISTED_MAX if path == TREE else userdata.FILES_MAX)


@pytest.mark.parametrize("path", [TREE, SPLIT])
async def test_a_larger_tree_is_refused(
    server: GatewayInProcess, user: GatewayUser, path: str
) -> None:
    """Files as deep as earlier versions took them."""
    deep = "/".join(["f"] * 230)
    files = [f"{number}/{deep}/w.json" for number in range(userdata.FILES_MAX)]
    await put_files(server, user, files)
    (answer,) = await attack(user, [("GET", path, None)])
    assert answer.status == 413
    assert "10,000 entries" in answer.json()["error"]["message"]


async def test_a_file_has_at_most_20_folders_above_it(user: GatewayUser) -> None:
    async with user.http_async() as http:
        for folders, status in ((userdata.PATH_FOLDERS_MAX, 200), (21, 400)):
            path = "%2F".join(["f"] * folders + [f"{folders}.json"])
            answer = await http.post(f"/userdata/{path}", content=b"{}")
            assert answer.status_code == status, answer.text
            assert status == 200 or "20 folders" in answer.text


def settings_of(size: int) -> bytes:
    """As deep as a body may be, with as many values as fit."""
    row = b"[" * 90 + b"0" + b"]" * 90 + b","
    rows = row * 1_000
    flat = b"0," * ((size - len(rows) - len('{"x":[0]}')) // 2)
    body = b'{"x":[' + rows + flat + b"0]}"
    return body if len(body) == size else body.replace(b'"x"', b'"xx"')


async def test_settings_may_have_512_kib(server: GatewayInProcess) -> None:
    text = _bytes({"x": "y" * (userdata.SETTINGS_BYTES_MAX - len('{"x":""}'))})
    for each in (text, settings_of(400_000)):
        other = await server.new_user()  # settings add up
        (answer,) = await attack(other, [("POST", "/settings", each)])
        assert answer.status == 200, answer.raw[-300:]
    user = other
    await attack(user, [("POST", "/settings/small", b"1"), ("GET", "/settings", None)])


async def test_larger_settings_are_refused(user: GatewayUser) -> None:
    text = _bytes({"x": "y" * (userdata.SETTINGS_BYTES_MAX + 1 - len('{"x":""}'))})
    for each in (text, _bytes({"x": "y" * 7_000_000})):
        (answer,) = await attack(user, [("POST", "/settings", each)])
        assert answer.status == 413
        assert "524,288 bytes" in answer.json()["error"]["message"]


IDS = [f"{number:08x}-0000-4000-8000-000000000000" for number in range(190_000)]


@pytest.mark.parametrize(
    ("path", "name"),
    [("/api/jobs/cancel", "job_ids"), ("/queue", "delete"), ("/history", "delete")],
)
async def test_a_call_names_at_most_10_000_ids(user: GatewayUser, path: str, name: str) -> None:
    (taken,) = await attack(user, [("POST", path, {name: IDS[:IDS_MAX]})])
    assert taken.status == 200
    for count in (IDS_MAX + 1, 190_000):
        (refused,) = await attack(user, [("POST", path, {name: IDS[:count]})])
        assert refused.status == 400
        assert "10,000 ids" in refused.raw.decode()
