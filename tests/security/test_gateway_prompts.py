"""Hostile prompts, bodies, names and frames: refused in words, within bounds, and none of it reaches a backend."""

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import URL, plane_on
from tests.support.server.customers import effect_setup_on, png
from tests.support.server.gateway import PROMPT, GatewayProcess, GatewayUser, gateway_on
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from comfyfleet.protocol import sockets as protocol_sockets
from comfyfleet.protocol.http import BodyTooLarge
from comfyfleet.protocol.sockets import Socket
from comfyfleet.protocol.validation import validate
from comfyfleet.server.app import open_control_plane
from comfyfleet.server.gateway import feed as gateway_feed
from comfyfleet.server.gateway.feed import GatewayFeeds
from comfyfleet.server.gateway.offers import OfferedNode
from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.gateway import app as bodies

SOURCE: dict[str, Any] = {
    "class_type": "EmptyImage",
    "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0},
}
INVERT = "ImageInvert"


def body(prompt: Any = PROMPT, **more: Any) -> bytes:
    return json.dumps({"prompt": prompt, **more}).encode()


def with_number(text: str) -> bytes:
    return body().replace(b'{"prompt"', b'{"number": ' + text.encode() + b', "prompt"', 1)


def save(source: str) -> dict[str, Any]:
    return {"class_type": "SaveImage", "inputs": {"images": [source, 0], "filename_prefix": "x"}}


def chain(length: int) -> dict[str, Any]:
    nodes = {"0": SOURCE}
    for each in range(1, length):
        nodes[str(each)] = {"class_type": INVERT, "inputs": {"image": [str(each - 1), 0]}}
    return {**nodes, "save": save(str(length - 1))}


def with_cycle(length: int) -> dict[str, Any]:
    first = {"class_type": INVERT, "inputs": {"image": [str(length - 1), 0]}}
    return {**chain(length), "0": first}


DEEP = b'{"prompt": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}"
REFUSED: dict[str, tuple[bytes, set[int]]] = {
    "number NaN": (with_number("NaN"), {400}),
    "number Infinity": (with_number("Infinity"), {400}),
    "number -Infinity": (with_number("-Infinity"), {400}),
    "number beyond a float": (with_number("1e999"), {400}),
    "number nan in words": (with_number('"nan"'), {400}),
    "number inf in words": (with_number('"-inf"'), {400}),
    "number in words": (with_number('"many"'), {500}),
    "number as list": (with_number("[1]"), {500}),
    "number of 5000 digits": (with_number("9" * 5000), {400}),
    "number of 390 digits": (with_number("9" * 390), {500}),
    "NaN inside": (body(extra_data={"x": 1}).replace(b'"x": 1', b'"x": NaN'), {400}),
    "NUL": (body(extra_data={"x": "\0"}), {400}),
    "NUL in a name": (body({**PROMPT, "\0": SOURCE}), {400}),
    "half a character": (body(client_id="\ud800"), {400}),
    "half a character in an input": (body({"1": {**SOURCE, "x\udfff": 1}}), {400}),
    "50 MB": (body(extra_data={"x": "y" * 50_000_000}), {413}),
    "deep": (DEEP, {400}),
    "101 levels": (body(extra_data={"x": json.loads("[" * 100 + "]" * 100)}), {400}),
    "100,000 nodes": (body({str(each): SOURCE for each in range(100_000)}), {400, 413}),
    "12,000 nodes": (body({str(each): {"class_type": "x"} for each in range(12_000)}), {400}),
    "5,000 wrong outputs": (body({str(each): save("no") for each in range(5_000)}), {400}),
    "a cycle of two": (body(with_cycle(2)), {400}),
    "a cycle of 3,000": (body(with_cycle(3_000)), {400}),
    "a link to itself": (body({"1": save("1")}), {400}),
    "an unknown type": (body({**PROMPT, "3": {"class_type": "Shell", "inputs": {}}}), {400}),
    "a type that is a number": (body({**PROMPT, "3": {"class_type": 3, "inputs": {}}}), {400}),
    "a missing node": (body({"2": save("1")}), {400}),
    "a link to a list": (body({"2": {**save("1"), "inputs": {"images": [["1"], 0]}}}), {400}),
    "a slot that is no slot": (
        body({"1": SOURCE, "2": {**save("1"), "inputs": {"images": ["1", "0"]}}}),
        {400},
    ),
    "a negative slot far out": (
        body({"1": SOURCE, "2": {**save("1"), "inputs": {"images": ["1", -9]}}}),
        {400},
    ),
    "no object": (b"[]", {400, 500}),
    "nothing": (b"", {500}),
    "no JSON": (b"{", {500}),
    "no text": (b"\xff\xfe\x00", {400, 500}),
    "an id that is none": (body(prompt_id="../../etc/passwd"), {400}),
    "an id in capitals": (body(prompt_id="AAAAAAAA-AAAA-4AAA-8AAA-AAAAAAAAAAAA"), {400}),
}


def runs_of(gateway: GatewayProcess) -> int:
    engine = gateway.engines[0]
    return len(httpx.get(f"{engine.url}/history").json())


def test_what_can_not_run_is_refused_in_words_and_reaches_no_backend(
    gateway: GatewayProcess, user: GatewayUser
) -> None:
    before = runs_of(gateway)
    with user.http() as mine:
        for name, (content, statuses) in REFUSED.items():
            begun = time.monotonic()
            refused = mine.post("/prompt", content=content)
            assert refused.status_code in statuses, f"{name}: {refused.text[:200]}"
            assert refused.text, name
            assert len(refused.content) < 2_000_000, name
            assert time.monotonic() - begun < 20, name
            if refused.status_code == 400:
                assert {"type", "message"} <= refused.json()["error"].keys(), name
            assert "site-packages" not in refused.text, name
        assert mine.get("/prompt").json() == {"exec_info": {"queue_remaining": 0}}
        assert mine.get("/history").json() == {}
    assert runs_of(gateway) == before


def test_what_only_looks_hostile_runs(gateway: GatewayProcess, user: GatewayUser) -> None:
    twice = body().replace(b'{"prompt"', b'{"prompt": 1, "prompt"', 1)
    long_chain = body(chain(400))
    with user.open_engine_client() as client:
        for content in (with_number("1e308"), with_number("-1e308"), twice, long_chain):
            sent = client.http.post("/prompt", content=content, headers={"Content-Type": "x/y"})
            assert sent.status_code == 200, sent.text
            client.wait_idle()
            entry = client.history(sent.json()["prompt_id"])
            assert entry["status"]["status_str"] == "success", entry["status"]["messages"]


def test_a_link_to_a_missing_node_in_an_unknown_input_kills_no_backend(
    gateway: GatewayProcess, user: GatewayUser
) -> None:
    dangling = {**PROMPT["2"]["inputs"], "unknown": ["nobody", 0], "also": ["", 1]}
    hostile = {**PROMPT, "2": {**PROMPT["2"], "inputs": dangling}}
    with user.open_engine_client() as client:
        for prompt in (hostile, PROMPT):
            prompt_id = client.submit(prompt)
            client.wait_idle()
            assert client.history(prompt_id)["status"]["status_str"] == "success"


def test_a_backend_gets_nothing_but_what_it_runs(
    gateway: GatewayProcess, user: GatewayUser
) -> None:
    secret = "a-secret-of-the-client"
    noted = {
        **PROMPT["1"],
        "_meta": {"title": "t" * 5000, "note": secret},
        "is_changed": [secret],
        secret: {"x": secret},
    }
    prompt_id = "22222222-2222-4222-8222-222222222222"
    more = {
        "prompt_id": prompt_id,
        "client_id": secret,
        "number": 4711.5,
        "extra_data": {"x": secret, "api_key_comfy_org": secret, "token": secret},
        secret: secret,
    }
    with user.open_engine_client() as client:
        client.submit({**PROMPT, "1": noted, "9": SOURCE}, **more)
        client.wait_idle()
        seen = client.history(prompt_id)
        assert seen["prompt"][2]["1"] == noted
    (last,) = list(httpx.get(f"{gateway.engines[0].url}/history?max_items=1").json().values())
    told = json.dumps(last)
    assert secret not in told
    assert prompt_id not in told
    assert "4711.5" not in told
    assert user.key not in told
    assert set(last["prompt"][2]) == {"1", "2"}
    assert set(last["prompt"][2]["1"]) == {"class_type", "inputs", "_meta"}
    assert len(last["prompt"][2]["1"]["_meta"]["title"]) == 200


def test_one_id_is_one_job_and_names_no_other_prompt(
    gateway: GatewayProcess, user: GatewayUser
) -> None:
    prompt_id = "33333333-3333-4333-8333-333333333333"
    other = {**PROMPT, "1": {**SOURCE, "inputs": {**SOURCE["inputs"], "color": 255}}}
    colleague = gateway.user(user.tenant_id)
    before = runs_of(gateway)
    with user.http() as mine, colleague.http() as theirs, ThreadPoolExecutor(8) as many:
        sent = [*many.map(
            lambda at: mine.post("/prompt", content=body((PROMPT, other)[at % 2], prompt_id=prompt_id)),
            range(16),
        )]  # fmt: skip
        # Whichever came first is what the id names.
        assert sorted(each.status_code for each in sent) == [200] * 8 + [400] * 8
        taken = [each.json()["prompt_id"] for each in sent if each.status_code == 200]
        assert {*taken} == {prompt_id}
        first = (PROMPT, other)[sent[1].status_code == 200]
        theirs.post("/prompt", content=body(prompt_id=prompt_id))
        deadline = time.monotonic() + 20
        while not (mine.get("/history").json() and theirs.get("/history").json()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert list(mine.get("/history").json()) == [prompt_id]
        assert list(theirs.get("/history").json()) == [prompt_id]
        again = mine.post("/prompt", content=body(first, prompt_id=prompt_id))
        assert again.status_code == 200
        assert mine.get("/prompt").json() == {"exec_info": {"queue_remaining": 0}}
    assert runs_of(gateway) == before + 2


async def test_one_id_at_two_control_planes_at_once_is_one_job(
    databases: Databases, tmp_path: Path
) -> None:
    if not databases.server_url:
        pytest.skip("SQLite has one control plane")
    prompt_id = "44444444-4444-4444-8444-444444444444"
    async with (
        gateway_on(databases, tmp_path) as server,
        open_control_plane(server.plane.settings, tmp_path, server.plane.clock) as second,
    ):
        user = await server.new_user(tokens=100)
        apps = [create_app(server.plane), create_app(second)]
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(
                    httpx.AsyncClient(
                        transport=httpx.ASGITransport(app), base_url=URL, headers=user.headers
                    )
                )
                for app in apps
            ]
            sent = await asyncio.gather(
                *(
                    clients[at % 2].post("/prompt", content=body(prompt_id=prompt_id))
                    for at in range(20)
                )
            )
            assert {each.status_code for each in sent} == {200}
            async with asyncio.timeout(20):
                while not (await clients[1].get("/history")).json():  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert list((await clients[0].get("/history")).json()) == [prompt_id]
            assert (await clients[0].get("/prompt")).json()["exec_info"]["queue_remaining"] == 0
        async with httpx.AsyncClient() as client:
            runs = await client.get(f"{server.engines[0].url}/history")
        assert len(runs.json()) == 1


NAMES = [
    "../secret.png",
    "..\\secret.png",
    "a/../../secret.png",
    "/etc/passwd",
    "\\\\host\\share\\x.png",
    "C:\\windows\\x.png",
    "....//x.png",
    "\u2024\u2024/x.png",
    "\uff0e\uff0e/x.png",
    "%2e%2e/x.png",
    "x\0.png",
    "x" * 5000 + ".png",
    ".",
    "..",
    "/",
    " ",
    "a/b/c/d/../../../../../../x",
    "~root/x.png",
    "file:///etc/passwd",
    "x.png [output]",
    "../x.png [temp]",
    "con",
    "x\n.png",
    "\u202egnp.x",
]


async def test_names_lead_nowhere_but_into_the_callers_own_folder(
    databases: Databases, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outside = tmp_path / "secret.png"
    outside.write_bytes(b"secret")
    async with plane_on(databases, tmp_path / "data") as plane, effect_setup_on(plane) as customers:
        ada, eve = await customers.customer(), await customers.customer()
        for name in NAMES:
            for params in (
                {"filename": name},
                {"filename": "x.png", "subfolder": name},
                {"filename": name, "type": "input", "subfolder": name},
                {"filename": "x.png", "type": name},
            ):
                found = await ada.client.get("/view", params=params)
                assert found.status_code in (400, 403, 404), (name, found.status_code)
            for form in ({"subfolder": name}, {"type": name}, {}):
                file = ("x.png" if form else name, png(), "image/png")
                sent = await ada.client.post("/upload/image", data=form, files={"image": file})
                # ComfyUI answers 500 to what it does not foresee.
                assert sent.status_code in (200, 400, 403, 422, 500), (name, sent.status_code)
                if sent.status_code == 200:
                    kept = sent.json()
                    assert ".." not in f"{kept['subfolder']}/{kept['name']}".split("/")
                    where = {"filename": kept["name"], "subfolder": kept["subfolder"], "type": kept["type"]}  # fmt: skip
                    assert (await eve.client.get("/view", params=where)).status_code in (400, 403, 404)  # fmt: skip
    assert not [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
    assert outside.read_bytes() == b"secret"
    assert sorted(os.listdir(tmp_path)) == ["data", "secret.png"]


async def test_ids_and_queries_that_no_database_keeps_are_no_errors_of_ours(
    databases: Databases, tmp_path: Path
) -> None:
    async with plane_on(databases, tmp_path) as plane, effect_setup_on(plane) as customers:
        ada = await customers.customer()
        for odd in (
            "%00",
            "a%00b",
            "%ed%a0%80",
            "%ff",
            "..%2f..",
            "%0a",
            "9" * 5000,
            "%F0%9F%8E%83",
        ):
            for path in (
                f"/history/{odd}",
                f"/api/jobs/{odd}",
                f"/object_info/{odd}",
                f"/history?max_items={odd}",
                f"/api/jobs?workflow_id={odd}",
                f"/view?filename={odd}",
                f"/userdata/{odd}",
                f"/models/{odd}",
            ):  # fmt: skip
                found = await ada.client.get(path)
                is_number = "max_items" in path
                assert found.status_code < 500 or is_number, (path, found.text)
        hostile: list[Any] = [["\0"], [1, None, {}], "x" * 10_000]
        for content in ({"delete": each} for each in hostile):
            for path in ("/queue", "/history"):
                sent = await ada.client.post(path, content=json.dumps(content))
                assert sent.status_code in (200, 400), (path, sent.text)
        many = {"delete": [f"{each:032x}" for each in range(50_000)]}
        assert (await ada.client.post("/queue", json=many)).status_code in (200, 400, 413)


def multipart(*parts: bytes) -> tuple[bytes, dict[str, str]]:
    content = b"".join(b"--x\r\n" + each + b"\r\n" for each in parts) + b"--x--\r\n"
    return content, {"Content-Type": "multipart/form-data; boundary=x"}


def part(name: str, value: bytes = b"1", extra: bytes = b"") -> bytes:
    return f'Content-Disposition: form-data; name="{name}"\r\n'.encode() + extra + b"\r\n" + value


def test_forms_without_end_are_refused(gateway: GatewayProcess, user: GatewayUser) -> None:
    hostile = [
        multipart(*(part(f"f{each}") for each in range(5_000))),
        multipart(*(part(f'f"; filename="{each}') for each in range(5_000))),
        multipart(part("image", b"x" * 3_000_000)),
        multipart(part("image", extra=b"X: " + b"y" * 5_000_000 + b"\r\n")),
        multipart(part("image", extra=b"X: y\r\n" * 200_000)),
        (b"--x\r\n" * 200_000, {"Content-Type": "multipart/form-data; boundary=x"}),
        (b"x" * 1_000_000, {"Content-Type": "multipart/form-data"}),
        (b"", {"Content-Type": "multipart/form-data; boundary=" + "x" * 5_000}),
    ]
    with user.http() as mine:
        for content, headers in hostile:
            begun = time.monotonic()
            sent = mine.post("/upload/image", content=content, headers=headers)
            assert 400 <= sent.status_code <= 500, sent.text
            assert time.monotonic() - begun < 20
        assert mine.get("/prompt").status_code == 200


def test_a_compressed_body_is_not_unpacked(gateway: GatewayProcess, user: GatewayUser) -> None:
    with user.http() as mine:
        headers = {"Content-Encoding": "gzip"}
        bomb = b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + b"\0" * 1000
        assert mine.post("/prompt", content=bomb, headers=headers).status_code in (400, 500)


def test_frames_that_are_too_long_or_too_deep_do_no_harm(
    gateway: GatewayProcess, user: GatewayUser
) -> None:
    url = f"{gateway.url.replace('http', 'ws', 1)}/ws?clientId={'x' * 3000}"
    with connect(url, additional_headers=user.headers) as socket:
        socket.recv(timeout=10)
        for text in ("[" * 10_000, "{", "\0", "null", '{"type": "feature_flags", "data": 1}'):
            socket.send(text)
        socket.send(b"\xff" * 1000)
        with pytest.raises(ConnectionClosed):
            _send_and_read_all(socket, "x" * 3_000_000)
    with user.open_engine_client() as client:
        client.listen("x" * 3000)


def _send_and_read_all(socket: Any, text: str) -> None:
    socket.send(text)
    while True:
        socket.recv(timeout=20)


def test_a_socket_that_does_not_read_holds_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol_sockets, "BACKLOG_BYTES_MAX", 100)

    async def fill() -> None:
        socket = Socket()
        socket.push(b"x" * 1000)  # one is always taken
        assert not socket.overrun.is_set()
        assert len(await socket.next_frame()) == 1000
        for _ in range(10):
            socket.push("y" * 10)
        assert not socket.overrun.is_set()
        socket.push("y")
        assert socket.overrun.is_set()

    asyncio.run(fill())


async def stalled() -> Message:
    await asyncio.sleep(60)
    raise AssertionError


async def test_a_body_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "JSON_SECONDS_MAX", 0.02)
    monkeypatch.setattr(bodies, "SILENCE_SECONDS_MAX", 0.02)
    for is_file in (True, False):
        receive = bodies.limited(stalled, declared=0, bytes_max=10, is_file=is_file)
        with pytest.raises(bodies.BodyTimeout):
            await receive()


async def test_a_body_is_as_long_as_it_may_be_whatever_it_declares() -> None:
    async def chunks() -> AsyncIterator[Message]:
        while True:
            yield {"type": "http.request", "body": b"x" * 4, "more_body": True}

    stream = chunks()
    receive = bodies.limited(stream.__anext__, declared=1, bytes_max=10, is_file=True)
    await receive()
    await receive()
    with pytest.raises(BodyTooLarge):
        await receive()
    declared = bodies.limited(stream.__anext__, declared=11, bytes_max=10, is_file=True)
    with pytest.raises(BodyTooLarge):
        await declared()


def test_many_wrong_outputs_are_told_of_within_bounds() -> None:
    info = {"input": {"required": {"images": ["IMAGE"]}}, "output": [], "output_node": True}
    nodes = {"SaveImage": OfferedNode("SaveImage", info)}
    prompt = {str(each): {"class_type": "SaveImage", "inputs": {}} for each in range(9_000)}
    verdict = validate(prompt, nodes=nodes)
    assert verdict.error is not None
    assert len(json.dumps(verdict.node_errors)) < 200_000


async def test_a_prompt_that_was_not_taken_holds_nothing_back(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with plane_on(databases, tmp_path) as plane, effect_setup_on(plane) as customers:
        ada = await customers.customer()
        feeds: list[GatewayFeeds] = []
        made = gateway_feed.GatewayFeeds.__init__

        def noted(self: GatewayFeeds, *args: Any) -> None:
            feeds.append(self)
            made(self, *args)

        monkeypatch.setattr(gateway_feed.GatewayFeeds, "__init__", noted)
        transport = httpx.ASGITransport(create_app(plane))
        headers = {"Authorization": f"Bearer {ada.key}"}
        async with httpx.AsyncClient(transport=transport, base_url=URL, headers=headers) as client:
            assert (await client.post("/prompt", json={"prompt": PROMPT})).status_code >= 400
        assert not feeds[0]._feeds
