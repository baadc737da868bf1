"""Long texts, many variables and long lists are served up to their limits while the event loop turns, and refused above
them before the work starts."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.gateway import GatewayInProcess, GatewayUser, gateway_on
from tests.support.server.loop_stalls import LoopStalls
from tests.support.server.outside import RawAnswer, raw_request, send_from_outside

from comfyfleet.api import worker as worker_api
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.catalog.model import EffectSettings
from comfyfleet.server.maintenance.embedded_fleet import FLEET, STAGE, embedded_fleet_secret

INPUT_CHARACTERS_MAX = 256 * 1024
DRAW: dict[str, Any] = {
    "1": {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0}},
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
}  # fmt: skip


@pytest.fixture
async def server(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[GatewayInProcess]:
    """A server whose worker takes no jobs, with a workflow that has a text and a number."""
    async with gateway_on(sqlite_databases, tmp_path, show_backends=False) as server:
        headers = {"Authorization": f"Bearer {server.admin_key}"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers) as admin:
            answer = await admin.post("/api/admin/maintenance", json={"on": True})
            assert answer.status_code == 200, answer.text
            prefix = {"name": "prefix", "type": "text", "binding": "2.filename_prefix", "default": "x"}  # fmt: skip
            draw = {"slug": "draw", "document": DRAW, "price_tokens": 0, "properties": [prefix]}
            answer = await admin.post("/api/admin/workflows", json=draw)
            assert answer.is_success, answer.text
        yield server


@pytest.fixture
async def user(server: GatewayInProcess) -> GatewayUser:
    return await server.new_user()


async def call(
    user: GatewayUser, method: str, path: str, body: Any = None, **options: Any
) -> RawAnswer:
    data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
    request = raw_request(method, path, **{"key": user.key, "body": data, **options})
    async with LoopStalls(f"{method} {path}"):
        (answer,) = await send_from_outside(user.url, [request])
    return answer


def saved_as(prefix: str) -> dict[str, Any]:
    inputs = {"images": ["1", 0], "filename_prefix": prefix}
    return {"prompt": {**DRAW, "2": {"class_type": "SaveImage", "inputs": inputs}}}


async def test_a_filename_prefix_has_at_most_1_000_characters(user: GatewayUser) -> None:
    for size, status in ((1_000, 200), (1_001, 400), (3_900_000, 400)):
        answer = await call(user, "POST", "/prompt", saved_as("x" * size))
        assert answer.status == status, answer.raw[-500:]
        if status == 400:
            assert "at most 1,000 characters" in answer.json()["error"]["message"]


async def test_a_prompt_that_no_fleet_accepts_is_refused_by_its_size(user: GatewayUser) -> None:
    answer = await call(user, "POST", "/prompt", saved_as("x" * 7_900_000))
    assert (answer.status, answer.json()["error"]["type"]) == (400, "prompt_too_large")


async def test_a_large_text_is_accepted_up_to_the_size_of_a_prompt(user: GatewayUser) -> None:
    """4 MiB by default: long texts and pictures in Base64 are what real clients send."""
    text = {"class_type": "PrimitiveString", "inputs": {"value": "x" * 4_100_000}}
    shown = {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}}
    answer = await call(user, "POST", "/prompt", {"prompt": {"1": text, "2": shown}})
    assert answer.status == 200, answer.raw[-500:]


async def test_a_long_class_type_is_shown_in_part(user: GatewayUser) -> None:
    for size, shown in ((200, 200), (201, 200), (3_900_000, 200)):
        prompt = {"1": {"class_type": "T" * size, "inputs": {}}}
        answer = await call(user, "POST", "/prompt", {"prompt": prompt})
        assert answer.status == 400
        assert answer.json()["error"]["extra_info"]["class_type"] == "T" * shown
        assert len(answer.body) < 2_000


async def test_validation_errors_show_no_code_of_the_control_plane(user: GatewayUser) -> None:
    preview = {"class_type": "PreviewImage", "inputs": {"images": ["99", 0]}}
    missing = await call(user, "POST", "/prompt", {"prompt": {"3": preview}})
    preview = {"class_type": "PreviewImage", "inputs": {"images": ["1", 77]}}
    wrong_slot = await call(user, "POST", "/prompt", {"prompt": {**DRAW, "3": preview}})
    assert (missing.status, wrong_slot.status) == (400, 200)
    for answer in (missing, wrong_slot):
        assert ".py" not in answer.raw.decode()
        (error,) = answer.json()["node_errors"]["3"]["errors"]
        assert error["extra_info"]["traceback"] == []
        assert error["extra_info"]["exception_type"] in ("KeyError", "IndexError")


async def test_inputs_as_a_list_are_refused(user: GatewayUser) -> None:
    prompt = {**DRAW, "1": {"class_type": "EmptyImage", "inputs": [1]}}
    answer = await call(user, "POST", "/prompt", {"prompt": prompt})
    assert answer.status == 400
    assert answer.json()["error"]["type"] == "prompt_outputs_failed_validation"
    assert list(answer.json()["node_errors"]) == ["1"]


def step(number: int, prefix: str) -> dict[str, Any]:
    properties = {"prefix": prefix}
    return {"name": f"s{number}", "workflow": "draw", "properties": properties, "children_per_parent": 2}  # fmt: skip


async def new_pipeline(user: GatewayUser, name: str, texts: list[str]) -> RawAnswer:
    steps = [step(number, text) for number, text in enumerate(texts)]
    return await call(user, "POST", "/api/pipelines", {"name": name, "steps": steps})


async def test_templates_of_a_pipeline_have_200_000_characters_in_all(user: GatewayUser) -> None:
    seeds = "{{ seed }}" * 400
    answer = await new_pipeline(user, "largest", [seeds] * 50)
    assert answer.status == 201, answer.raw[-500:]
    path = f"/api/pipelines/{answer.json()['id']}/runs"
    answer = await call(user, "POST", path, {"base_candidates": 1})
    assert answer.status == 201, answer.raw[-500:]
    for texts in ([seeds] * 49 + [seeds + "x"], ["{{ seed }}" * 1_900] * 50):
        answer = await new_pipeline(user, "larger", texts)
        assert answer.status == 422
        assert "at most 200,000 characters" in answer.raw.decode()


def variables_of(size: int, name: str = "v") -> dict[str, str]:
    """Variables whose JSON has so many characters, as `json.dumps` writes it."""
    return {name: "x" * (size - len(json.dumps({name: ""})))}


async def test_variables_of_a_run_have_256_kib_in_all(user: GatewayUser) -> None:
    answer = await new_pipeline(user, "small", ["{{ seed }}"])
    path = f"/api/pipelines/{answer.json()['id']}/runs"
    for size, status in ((INPUT_CHARACTERS_MAX + 1, 413), (7_000_000, 413), (INPUT_CHARACTERS_MAX, 201)):  # fmt: skip
        new = {"base_candidates": 1, "variables": variables_of(size)}
        answer = await call(user, "POST", path, new)
        assert answer.status == status, answer.raw[-500:]
    run = f"/api/pipeline-runs/{answer.json()['id']}"
    many = {f"v{number}": "x" * 100 for number in range(60_000)}
    for more in ({"w": 1}, many):
        answer = await call(user, "PATCH", run, {"variables": more})
        assert answer.status == 413
        assert "variables have more than 262,144" in answer.raw.decode()
    changed = variables_of(INPUT_CHARACTERS_MAX - 100)
    answer = await call(user, "PATCH", run, {"variables": changed})
    assert (answer.status, answer.json()["variables"]) == (200, changed)


async def test_a_list_of_runs_leaves_large_variables_out(user: GatewayUser) -> None:
    answer = await new_pipeline(user, "small", ["{{ seed }}"])
    path = f"/api/pipelines/{answer.json()['id']}/runs"
    large = {f"v{number}": number for number in range(15_000)}
    async with user.http_async() as http:
        for variables in [{"a": 1}, *[large] * 30]:
            new = {"base_candidates": 1, "variables": variables}
            created = await http.post(path, json=new)
            assert created.status_code == 201, created.text
    answer = await call(user, "GET", "/api/pipeline-runs?limit=100")
    assert [run["variables"] for run in answer.json()["runs"]] == [{}] * 30 + [{"a": 1}]


async def test_inputs_of_a_graph_run_have_256_kib_in_all(user: GatewayUser) -> None:
    nodes = [{"id": "a", "type": "input"}, {"id": "r", "type": "output"}]
    graph = {"name": "g", "nodes": nodes, "connections": [{"from": "a.value", "to": "r.value"}]}
    answer = await call(user, "POST", "/api/graphs", graph)
    path = f"/api/graphs/{answer.json()['id']}/runs"
    largest = INPUT_CHARACTERS_MAX
    for inputs, status in (
        (variables_of(largest, "a"), 201),
        (variables_of(largest + 1, "a"), 413),
        ({"a": "x" * 7_900_000}, 413),
        ({"a": list(range(190_000))}, 413),
        ({"a": [{"a": 1}] * 60_000}, 413),
    ):
        answer = await call(user, "POST", path, {"inputs": inputs})
        assert answer.status == status, answer.raw[-500:]
        if status == 413:
            assert "inputs have more than 262,144" in answer.raw.decode()
    new = {"document": graph, "inputs": {"a": [{"a": 1}] * 60_000}}
    answer = await call(user, "POST", "/api/graph-runs", new)
    assert answer.status == 413


async def test_a_rerun_has_inputs_of_at_most_256_kib(
    server: GatewayInProcess, user: GatewayUser
) -> None:
    nodes = [{"id": "a", "type": "input"}, {"id": "r", "type": "output"}]
    graph = {"name": "g", "nodes": nodes, "connections": [{"from": "a.value", "to": "r.value"}]}
    answer = await call(user, "POST", "/api/graphs", graph)
    path = f"/api/graphs/{answer.json()['id']}/runs"
    answer = await call(user, "POST", path, {"inputs": {"a": "x"}})
    path = f"/api/graph-runs/{answer.json()['id']}/rerun"
    many = {f"n.p{number}": "x" * 70_000 for number in range(100)}
    for body, status in (
        ({"inputs": variables_of(INPUT_CHARACTERS_MAX, "a")}, 201),
        ({"inputs": variables_of(INPUT_CHARACTERS_MAX + 1, "a")}, 413),
        ({"inputs": {"a": "x" * 7_900_000}}, 413),
        ({"inputs": {"a": list(range(190_000))}}, 413),
        ({"set": many}, 413),
    ):
        answer = await call(user, "POST", path, body)
        assert answer.status == status, answer.raw[-500:]


async def test_a_pipeline_has_at_most_50_steps_whatever_they_are(user: GatewayUser) -> None:
    wrong: list[list[Any]] = [[1] * 195_000, ["x" * 20] * 90_000, [{}] * 51]
    for steps in wrong:
        answer = await call(user, "POST", "/api/pipelines", {"name": "p", "steps": steps})
        assert answer.status == 422
        assert "steps" in answer.raw.decode()


@pytest.mark.parametrize(
    ("route", "field"),
    [
        ("poll", "providers"),
        ("poll", "held"),
        ("poll", "models_loaded"),
        ("poll", "capabilities"),
        ("heartbeat", "events"),
        ("heartbeat", "want_outputs"),
        ("heartbeat", "want_assets"),
        ("heartbeat", "filled_in"),
        ("complete", "values"),
        ("complete", "outputs"),
    ],
)
async def test_long_lists_of_a_worker_are_refused_before_their_items_are_read(
    server: GatewayInProcess, user: GatewayUser, route: str, field: str
) -> None:
    secret = await embedded_fleet_secret(server.plane, server.folder)
    joining = {"worker_id": "w1", "fleet_slug": FLEET, "stage": STAGE}
    joined = await call(
        user, "POST", "/api/worker/register", joining, key="", headers={"X-Fleet-Secret": secret}
    )
    lease = {"dispatch_id": 1, "lease_token": str(uuid4())}
    body = {"worker_id": "w1"} if route == "poll" else lease
    many: Any = [1] * 190_000
    if field == "filled_in":
        many = {str(number): 1 for number in range(90_000)}
    if field == "providers":
        many = ["cloud"] * 190_000
    if field == "capabilities":
        many = ["x"] * 190_000
    answer = await call(
        user, "POST", f"/api/worker/{route}", {**body, field: many}, key=joined.json()["token"]
    )
    assert answer.status == 422
    assert field in answer.raw.decode()
    assert len(answer.body) < 5_000


async def test_a_registration_names_a_limited_number_of_things(
    server: GatewayInProcess, user: GatewayUser
) -> None:
    secret = await embedded_fleet_secret(server.plane, server.folder)
    facts = {"kind": "ComfyUI", "version": "1"}

    async def register(worker_id: str, **fields: Any) -> RawAnswer:
        body = {"worker_id": worker_id, "fleet_slug": FLEET, "stage": STAGE, **fields}
        headers = {"X-Fleet-Secret": secret}
        path = "/api/worker/register"
        return await call(user, "POST", path, body, key="", headers=headers)

    slugs = [f"c{number}" for number in range(190_000)]
    unknown = await register("w1", workflow_slugs=slugs[: worker_api.SLUGS_MAX])
    assert unknown.status == 422
    assert "and 980 more" in unknown.json()["error"]["message"]
    assert len(unknown.json()["error"]["details"]["unknown"]) == 20
    types = slugs[: worker_api.NODE_TYPES_MAX]
    answer = await register("w2", backend={**facts, "node_types": types})
    assert answer.status == 200, answer.raw[-500:]
    for count in (worker_api.SLUGS_MAX + 1, 190_000):
        answer = await register("w3", workflow_slugs=slugs[:count])
        assert answer.status == 422
        assert len(answer.body) < 2_000
    for count in (worker_api.NODE_TYPES_MAX + 1, 190_000):
        assert (await register("w4", backend={**facts, "node_types": slugs[:count]})).status == 422
    for count in (worker_api.MODEL_INPUTS_MAX + 1, 63_000):
        files = {f"X{number}.a": ["f"] for number in range(count)}
        assert (await register("w5", backend={**facts, "model_files": files})).status == 422


async def test_a_batch_has_1_000_jobs(server: GatewayInProcess) -> None:
    user = await server.new_user()
    effect_id = await new_effect(server)
    long = {"properties": {"prefix": "x" * 6_000}}
    for count, status in ((1_000, 201), (1_001, 422), (60_000, 422)):
        items = [long if count == 1_000 else {}] * count
        body = {"effect_id": effect_id, "items": items}
        answer = await call(user, "POST", "/api/ai-jobs/batches", body)
        assert answer.status == status, answer.raw[-500:]
        assert status == 201 or b"at most 1000 entries" in answer.body


async def new_effect(server: GatewayInProcess) -> str:
    async with server.plane.central.transaction() as tx:
        settings = EffectSettings(price_tokens=0, is_published=True)
        workflow = await catalog.workflow_by_slug(tx, "draw")
        made = await catalog.create_effect(
            tx,
            effect_id=uuid4(),
            slug="draw",
            workflow=workflow,
            settings=settings,
            now=server.plane.clock(),
        )
    return str(made.id)
