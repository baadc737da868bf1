"""Two tenants, and two users of one: by no route of the gateway does one see, change or sense what is another's."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import pytest
from blake3 import blake3
from tests.support.backends.engine_client import EngineClient
from tests.support.server.customers import png
from tests.support.server.gateway import PROMPT, GatewayProcess, GatewayUser

from comfyfleet.server.http.gateway import ROUTES

MARK = "markofada"
CLIENT = f"{MARK}-client"
ADAS_ID = "5adabeef-0000-4000-8000-000000000001"
# Which files the editor's page is made of.
OF_ANYBODY = {"/editor/extensions", "/editor/api/extensions"}
FORM = {"type": "input", "overwrite": "true"}
_PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")
# Moments and sizes of the spy's own things, and ids that are made for each.
_OF_THE_MOMENT = re.compile(r"\d{9,}(\.\d+)?|\d{4}-\d\d-\d\dT[\d:.+Z-]+|[0-9a-f]{8}-[0-9a-f-]{27}")


@dataclass(frozen=True)
class Names:
    """Ids and names of things of one user, or of nobody: the same forms."""

    prompt_id: str
    client_id: str
    output: str
    upload: str
    userdata: str
    asset_id: str
    asset_hash: str

    def all(self) -> dict[str, str]:
        return dict(vars(self))

    def body(self) -> dict[str, Any]:
        return {
            "delete": [self.prompt_id],
            "job_ids": [self.prompt_id],
            "prompt_id": self.prompt_id,
            "client_id": self.client_id,
            "hash": self.asset_hash,
            "name": self.upload,
            "clear": True,
        }

    def query(self) -> dict[str, str]:
        return {
            "filename": self.output,
            "subfolder": "",
            "clientId": self.client_id,
            "dir": self.userdata.rpartition("/")[0],
            "path": self.userdata.rpartition("/")[0],
            "recurse": "true",
            "workflow_id": self.prompt_id,
            "prompt_id": self.prompt_id,
        }

    def hidden_in(self, text: str) -> str:
        """The same text without these names and what differs from call to call."""
        for name, value in self.all().items():
            text = text.replace(value, f"<{name}>").replace(value.replace("/", "%2F"), f"<{name}>")
        return _OF_THE_MOMENT.sub("<…>", text)


def nobodys() -> Names:
    word = uuid4().hex[:9]
    return Names(
        prompt_id=f"{uuid4()}",
        client_id=f"{word}-client",
        output=f"{word}_00001_.png",
        upload=f"{word}-upload.png",
        userdata=f"workflows/{word}.json",
        asset_id=f"{uuid4()}",
        asset_hash=f"blake3:{blake3(word.encode()).hexdigest()}",
    )


def adas(client: EngineClient) -> Names:
    """Something of every kind: an upload, a run, a saved workflow, a setting, an asset."""
    prompt = json.loads(json.dumps(PROMPT).replace('"ComfyUI"', f'"{MARK}"'))
    picture, http = png(8, 77), client.http
    upload = {"image": (f"{MARK}-upload.png", picture, "image/png")}
    assert http.post("/upload/image", data=FORM, files=upload).status_code == 200
    assert client.submit(prompt, prompt_id=ADAS_ID, client_id=CLIENT) == ADAS_ID
    client.wait_idle()
    saved = http.post(f"/userdata/workflows%2F{MARK}.json", content=f'{{"a": "{MARK}"}}')
    assert saved.status_code == 200, saved.text
    http.post("/settings", json={MARK: MARK})
    asset_id = http.post(
        "/api/v2/assets", files={"file": (f"{MARK}-asset.png", png(9, 78), "image/png")}
    ).json()["id"]
    return Names(
        prompt_id=ADAS_ID,
        client_id=CLIENT,
        output=f"{MARK}_00001_.png",
        upload=f"{MARK}-upload.png",
        userdata=f"workflows/{MARK}.json",
        asset_id=asset_id,
        asset_hash=f"blake3:{blake3(png(9, 78)).hexdigest()}",
    )


def state_of(http: httpx.Client, names: Names) -> dict[str, Any]:
    """All that a user sees of its own."""
    paths = [
        "/history",
        "/queue",
        "/api/jobs",
        f"/history/{names.prompt_id}",
        "/settings",
        "/v2/userdata?path=",
        f"/userdata/workflows%2F{MARK}.json",
        "/internal/files/input",
        "/internal/files/output",
    ]
    found = {path: http.get(path).json() for path in paths}
    for view in (f"filename={names.output}", f"filename={names.upload}&type=input"):
        seen = http.get(f"/view?{view}")
        found[view] = seen.status_code, len(seen.content)
    found["asset"] = http.get(f"/api/v2/assets/{names.asset_id}/content").content
    return found


Call = tuple[str, str, dict[str, Any]]


def calls(names: Names) -> Iterator[Call]:
    """Every route, with each name in each of its places, and all of them in query and body."""
    for route in ROUTES:
        parameters = _PARAMETER.findall(route.path)
        for value in names.all().values() if parameters else [""]:
            path = _PARAMETER.sub(value.replace("/", "%2F"), route.path)
            sent: dict[str, Any] = {"params": names.query()}
            if route.method not in ("GET", "DELETE"):
                sent["content"] = json.dumps(names.body())
            yield route.method, path, sent
    for folder in ("input", "output", "temp"):
        for name in (names.output, names.upload):
            yield "GET", "/view", {"params": {"filename": name, "type": folder}}
            yield "GET", "/view", {"params": {"filename": f"{name} [{folder}]"}}
            yield "GET", "/view", {"params": {"filename": name, "type": folder, "preview": "webp"}}
    for path in (names.upload, f"{names.output} [output]"):
        node = {"class_type": "LoadImage", "inputs": {"image": path}}
        save = {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}}
        yield "POST", "/prompt", {"json": {"prompt": {"1": node, "2": save}}}
    reference = {"__type": "core/ASSET", "info": {"id": names.asset_id, "hash": names.asset_hash}}
    node = {"class_type": "LoadImage", "inputs": {"image": reference}}
    save = {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}}
    yield "POST", "/api/v2/jobs", {"json": {"workflow": {"1": node, "2": save}}}
    mask = {"original_ref": json.dumps({"filename": names.upload, "type": "input"})}
    file = {"image": ("mask.png", png(), "image/png")}
    yield "POST", "/upload/mask", {"data": mask, "files": file}


def answers(user: GatewayUser, names: Names) -> list[tuple[str, int, str]]:
    with user.http() as http:
        found = []
        for method, path, sent in calls(names):
            answer = http.request(method, path, **sent)
            called = f"{method} {names.hidden_in(path)} {names.hidden_in(str(sent))}"
            found.append((called, answer.status_code, names.hidden_in(answer.text)))
        return found


@pytest.fixture(scope="module")
def ada(gateway: GatewayProcess) -> Iterator[tuple[GatewayUser, EngineClient, Names]]:
    user = gateway.user()
    with user.open_engine_client() as client:
        yield user, client, adas(client)


@pytest.mark.parametrize("whose", ["tenant", "colleague"])
def test_what_is_anothers_is_as_if_it_were_not_there(
    gateway: GatewayProcess, ada: tuple[GatewayUser, EngineClient, Names], whose: str
) -> None:
    owner, client, names = ada
    tenant_id = owner.tenant_id if whose == "colleague" else None
    spy, unknowing = gateway.user(tenant_id), gateway.user(tenant_id)
    before = state_of(client.http, names)
    with ThreadPoolExecutor(2) as both:
        of_adas = both.submit(answers, spy, names)
        of_nobodys = both.submit(answers, unknowing, nobodys())
    for (called, *found), (as_called, *nothing) in zip(
        of_adas.result(), of_nobodys.result(), strict=True
    ):
        assert called == as_called
        assert found == nothing, called
        assert MARK not in str(found), called
    assert state_of(client.http, names) == before


def test_no_socket_hears_of_anothers_prompts(
    gateway: GatewayProcess, ada: tuple[GatewayUser, EngineClient, Names]
) -> None:
    owner, client, _ = ada
    spies = [gateway.user(), gateway.user(owner.tenant_id)]
    with spies[0].open_engine_client() as one, spies[1].open_engine_client() as two:
        ears = [one.listen(CLIENT), two.listen(CLIENT), one.listen(), two.listen(ADAS_ID)]
        for ear in ears:
            ear.send({"type": "feature_flags", "data": {"supports_preview_metadata": True}})
        mine = client.listen(CLIENT)
        for client_id in (CLIENT, None):
            more = {"client_id": client_id} if client_id else {}
            client.submit(PROMPT, extra_data={"preview_method": "latent2rgb"}, **more)
        mine.wait("execution_success")
        client.wait_idle(0.5)
        for ear in ears:
            assert set(ear.names()) <= {"status", "feature_flags"}
            remaining = [
                data["status"]["exec_info"]["queue_remaining"]
                for kind, data in ear.events
                if kind == "status"
            ]
            assert set(remaining) == {0}


def test_another_can_not_interrupt_cancel_or_hide(
    gateway: GatewayProcess, ada: tuple[GatewayUser, EngineClient, Names]
) -> None:
    owner, client, _ = ada
    spies = [gateway.user(), gateway.user(owner.tenant_id)]
    prompt_id = client.submit(PROMPT, client_id=CLIENT)
    for spy in spies:
        with spy.http() as http:
            http.post("/interrupt")
            http.post("/interrupt", json={"prompt_id": prompt_id})
            http.post("/queue", json={"clear": True, "delete": [prompt_id]})
            http.post("/history", json={"clear": True, "delete": [prompt_id]})
            assert http.post(f"/api/jobs/{prompt_id}/cancel").json() == {"cancelled": False}
    client.wait_idle()
    assert client.history(prompt_id)["status"]["completed"]


def test_every_route_needs_a_key(gateway: GatewayProcess) -> None:
    headers = {"X-Forwarded-For": "203.0.113.9"}
    with httpx.Client(base_url=gateway.url, headers=headers) as stranger:
        for route in ROUTES:
            for prefix in (*route.prefixes, *(f"/editor{each}" for each in route.prefixes)):
                path = prefix + _PARAMETER.sub("x", route.path)
                if path not in OF_ANYBODY:
                    assert stranger.request(route.method, path).status_code == 401, path
