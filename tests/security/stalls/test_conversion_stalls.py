"""Documents of the editor are converted while the loop turns, and produce no more than a prompt may have, however often
their texts and subgraphs refer to each other."""

import asyncio
import copy
import dataclasses
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.backends.stub_server import until
from tests.support.databases.factory import Databases
from tests.support.server.gateway import GatewayInProcess, gateway_on
from tests.support.server.loop_stalls import LoopStalls
from tests.support.server.outside import RawAnswer, raw_request, send_from_outside

from comfyfleet.engine import nodes as engine_nodes
from comfyfleet.errors import LimitExceeded
from comfyfleet.server.gateway import v2_jobs
from comfyfleet.server.gateway.v2_jobs import CONVERSION_LIMITS, WAITING_PER_TENANT_MAX
from comfyfleet.workflow import emit
from comfyfleet.workflow.conversion import convert
from comfyfleet.workflow.model import DEFAULT_LIMITS, Limits
from comfyfleet.workflow.text_patterns import choose

TEXT = "PrimitiveStringMultiline"
SUBGRAPH = "00000001-0000-4000-8000-000000000000"


def node(node_id: int, kind: str, values: list[Any], title: str = "") -> dict[str, Any]:
    shown = {"title": title} if title else {}
    return {"id": node_id, "type": kind, "mode": 0, "inputs": [], "outputs": [], "properties": {}, "widgets_values": values, **shown}  # fmt: skip


def document(*nodes: dict[str, Any], inside: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    graph: dict[str, Any] = {"nodes": list(nodes), "links": [], "version": 0.4}
    if inside is not None:
        inner = {"id": SUBGRAPH, "name": "s", "nodes": inside, "links": [], "inputs": [], "outputs": []}  # fmt: skip
        graph["definitions"] = {"subgraphs": [inner]}
    return graph


def instances(count: int, inside: list[dict[str, Any]]) -> dict[str, Any]:
    return document(*(node(number + 1, SUBGRAPH, []) for number in range(count)), inside=inside)


OBJECT_INFO: dict[str, Any] = {
    TEXT: {"input": {"required": {"value": ["STRING", {"dynamicPrompts": True}]}}, "output": ["STRING"], "output_is_list": [False], "output_name": ["S"], "output_node": False},
    "SaveImage": {"input": {"required": {"filename_prefix": ["STRING", {"default": "x"}]}}, "output": [], "output_is_list": [], "output_name": [], "output_node": True},
    "Plain": {"input": {"required": {}}, "output": [], "output_is_list": [], "output_name": [], "output_node": True},
}  # fmt: skip


@pytest.fixture
async def server(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[GatewayInProcess]:
    """Its node for texts has dynamic prompts, as CLIPTextEncode of any ComfyUI."""
    nodes = dict(engine_nodes.registry())
    info = copy.deepcopy(dict(nodes[TEXT].info))
    info["input"]["required"]["value"][1]["dynamicPrompts"] = True
    nodes[TEXT] = dataclasses.replace(nodes[TEXT], info=info)
    async with gateway_on(sqlite_databases, tmp_path, nodes=nodes) as server:
        yield server


async def submitted(server: GatewayInProcess, workflow: dict[str, Any]) -> RawAnswer:
    user = await server.new_user()
    body = json.dumps({"workflow": workflow}).encode()
    request = raw_request("POST", "/api/v2/jobs", key=user.key, body=body)
    async with LoopStalls(f"POST /api/v2/jobs of {len(body):,} bytes"):
        (answer,) = await send_from_outside(user.url, [request])
    return answer


async def test_comments_without_an_end_take_one_pass(server: GatewayInProcess) -> None:
    for text in ("/*a" * 30_000, "*/" + "/*//\n" * 20_000):
        answer = await submitted(server, document(node(1, TEXT, [text])))
        assert answer.status == 422
        assert "no outputs" in answer.json()["error"]["message"]


@pytest.mark.parametrize("marks", ["/*a", "{a|", "\\", "//", "*/ |", "|}"])
def test_a_text_of_any_marks_is_read_in_one_pass(marks: str) -> None:
    """A quadratic pass would take hours for 2 MB."""
    assert len(choose("{" + marks * (2_000_000 // len(marks)), None)) <= 2_000_000


def test_nested_choices_are_read_up_to_a_limit() -> None:
    limits = Limits(choice_characters_max=30 + 28 + 26)
    text = "{{{" + "a" * 26 + "}}}"
    assert choose(text, None, limits=limits) == "a" * 26
    with pytest.raises(LimitExceeded, match="have at most 84 characters"):
        choose("{{{" + "a" * 27 + "}}}", None, limits=limits)


def test_choices_of_all_texts_have_one_limit() -> None:
    limits = Limits(choice_characters_max=1_000)
    fitting = document(*(node(number, TEXT, ["{" + "a" * 100 + "}"]) for number in range(10)))
    assert len(convert(fitting, OBJECT_INFO, limits=limits)) == 10
    fitting["nodes"].append(node(11, TEXT, ["{a}"]))
    with pytest.raises(LimitExceeded, match="choices"):
        convert(fitting, OBJECT_INFO, limits=limits)


def with_patterns(value: str, count: int, savers: int = 1) -> dict[str, Any]:
    saved = [node(2 + number, "SaveImage", ["%a.value%" * count]) for number in range(savers)]
    return document(node(1, TEXT, [value], "a"), *saved)


def test_patterns_produce_a_million_characters_in_all() -> None:
    assert DEFAULT_LIMITS.filled_characters_max == 1_000_000
    prompt = convert(with_patterns("x" * 1_000, 500, savers=2), OBJECT_INFO)
    assert len(prompt["2"]["inputs"]["filename_prefix"]) == 500_000
    for above in (with_patterns("x" * 1_000, 1_001), with_patterns("x" * 1_000, 334, savers=3)):
        with pytest.raises(LimitExceeded, match="have at most 1,000,000 characters"):
            convert(above, OBJECT_INFO)


async def test_a_job_whose_patterns_produce_more_is_refused(server: GatewayInProcess) -> None:
    """On earlier versions this body of 1 MB became a prompt of 400 MB."""
    answer = await submitted(server, with_patterns("x" * 1_000_000, 400))
    assert answer.status == 422
    assert "%Node.widget% patterns can have at most 1,000,000" in answer.json()["error"]["message"]


def primitive_of(value: str, targets: int) -> dict[str, Any]:
    """A primitive whose value goes to so many nodes."""
    primitive = {**node(1, "PrimitiveNode", [value]), "outputs": [{"type": "STRING"}]}
    graph = document(primitive)
    for number in range(targets):
        slot = {"name": "value", "type": "STRING", "link": number, "widget": {"name": "value"}}
        graph["nodes"].append({**node(2 + number, TEXT, [""]), "inputs": [slot]})
        graph["links"].append([number, 1, 0, 2 + number, 0, "STRING"])
    return graph


def test_what_primitives_and_subgraphs_repeat_has_a_limit() -> None:
    text = "x" * 10_000
    for repeated in (primitive_of, lambda text, count: instances(count, [node(1, TEXT, [text])])):
        fitting = convert(repeated(text, 10), OBJECT_INFO)
        size = sum(len(entry["inputs"]["value"]) for entry in fitting.values())
        names = sum(len(key) + len(entry["_meta"]["title"]) for key, entry in fitting.items())
        assert size == 100_000
        exact = Limits(text_characters_max=size + names)
        assert convert(repeated(text, 10), OBJECT_INFO, limits=exact) == fitting
        with pytest.raises(LimitExceeded, match="prompts can have at most"):
            convert(
                repeated(text, 10), OBJECT_INFO, limits=Limits(text_characters_max=size + names - 1)
            )


def test_lists_are_counted_before_they_are_copied() -> None:
    values = [[0] * 10_000]
    graph = instances(1_000, [node(1, "Unknown", values)])
    with pytest.raises(LimitExceeded, match="prompts can have at most"):
        convert(graph, OBJECT_INFO, unknown="keep", limits=Limits(text_characters_max=1_000_000))


def test_ids_of_nested_instances_have_a_limit() -> None:
    graph = instances(1, [node(number, "Plain", []) for number in range(2)])
    graph["nodes"][0]["id"] = "i" * 1_000
    assert len(convert(graph, OBJECT_INFO, limits=Limits(text_characters_max=4_000))) == 2
    with pytest.raises(LimitExceeded, match="at most 2,000 characters"):
        convert(graph, OBJECT_INFO, limits=Limits(text_characters_max=2_000))


def test_names_in_patterns_are_searched_in_a_limited_number_of_nodes() -> None:
    inside = [{**primitive_of("%a.b%", 1)["nodes"][0], "properties": {"Run widget replace on values": True}}]  # fmt: skip
    assert convert(instances(3, inside), OBJECT_INFO) == {}
    budgets = emit.Budgets(Limits(nodes_max=2))
    assert len(list(budgets.take_nodes([object(), object()]))) == 2  # type: ignore[list-item]
    with pytest.raises(LimitExceeded, match="patterns"):
        list(budgets.take_nodes([object()]))  # type: ignore[list-item]


def expanded_to(count: int) -> dict[str, Any]:
    """A document whose subgraphs have so many nodes, with the 100 instances."""
    inside = [node(number, "Plain", []) for number in range(count // 100 - 1)]
    alone = [node(1_000 + number, "Plain", []) for number in range(count % 100)]
    graph = instances(100, inside)
    graph["nodes"] += alone
    return graph


def test_subgraphs_of_a_job_expand_to_10_000_nodes() -> None:
    assert len(convert(expanded_to(10_000), OBJECT_INFO, limits=CONVERSION_LIMITS)) == 9_900
    with pytest.raises(LimitExceeded, match="more than 10000 nodes"):
        convert(expanded_to(10_001), OBJECT_INFO, limits=CONVERSION_LIMITS)


async def test_a_job_with_more_nodes_is_refused_before_they_are_made(
    server: GatewayInProcess,
) -> None:
    """On earlier versions 198,000 nodes were made of this document, and then counted."""
    inside = [node(number, "EmptyImage", [8, 8, 1, 0]) for number in range(330)]
    answer = await submitted(server, instances(600, inside))
    assert answer.status == 422
    assert "levels of subgraphs when expanded" in answer.json()["error"]["message"]


async def test_conversions_take_turns_and_leave_the_shared_threads_alone(
    server: GatewayInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one tenant's conversions stand still, others upload files, and their jobs wait for a turn only."""
    go_on, threads = threading.Event(), []

    def wait(*args: Any, **options: Any) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        go_on.wait()
        return convert(*args, **options)

    arrived = 0
    run = v2_jobs.conversions.run

    async def count(*args: Any) -> Any:
        nonlocal arrived
        arrived += 1
        return await run(*args)

    monkeypatch.setattr(v2_jobs, "convert", wait)
    monkeypatch.setattr(v2_jobs.conversions, "run", count)
    user, other = await server.new_user(), await server.new_user()
    body = json.dumps({"workflow": document(node(1, TEXT, ["a"]))}).encode()
    request = raw_request("POST", "/api/v2/jobs", key=user.key, body=body)
    conversions = v2_jobs.AT_ONCE_MAX + WAITING_PER_TENANT_MAX
    waiting = asyncio.create_task(
        send_from_outside(user.url, [request] * (conversions + 1), at_once=conversions + 1)
    )
    try:
        await until(lambda: arrived == conversions + 1 and len(threads) == v2_jobs.AT_ONCE_MAX)
        async with other.http_async() as http:
            files = {"image": ("a.png", b"\x89PNG\r\n\x1a\n", "image/png")}
            answer = await http.post("/upload/image", files=files)
            assert answer.status_code == 200, answer.text
    finally:
        go_on.set()
    statuses = [answer.status for answer in await waiting]
    assert statuses.count(429) == 1
    assert statuses.count(422) == conversions
    assert all(name.startswith("conversions") for name in threads)
