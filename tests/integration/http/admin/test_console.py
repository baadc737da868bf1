"""What operators' pages show of workers, workflow files, settings, and what the search finds."""

import asyncio
import json
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import ADMIN_KEY, plane_on
from tests.support.server.customers import EffectSetup, effect_setup_on
from tests.support.server.fleet import PROMPT, PROPERTIES
from tests.support.workers.memory_plane import eventually

from comfyfleet.server.http.admin import jobs
from comfyfleet.server.http.admin.overview import masked

BACKEND = {
    "kind": "ComfyUI",
    "version": "0.3",
    "gpu": "RTX 4090",
    "gpu_memory_bytes": 24 * 1024**3,
    "node_types": ["LoadImage", "ImageInvert", "SaveImage"],
}


@pytest.fixture
async def setup(databases: Databases, tmp_path: Path) -> AsyncIterator[EffectSetup]:
    async with plane_on(databases, tmp_path) as plane, effect_setup_on(plane) as setup:
        yield setup


async def get(setup: EffectSetup, path: str, **query: Any) -> dict[str, Any]:
    answer = await setup.fleet_setup.admin.get(f"/api/admin/{path}", params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_worker_is_listed_with_its_gpu_and_the_job_that_it_runs(setup: EffectSetup) -> None:
    ada = await setup.customer()
    job_id = await ada.job(setup.draw)
    async with setup.fleet_setup.worker("gpu-7", backend={**BACKEND, "node_types": []}) as worker:
        job = await worker.job(reading={"gpu_temperature_celsius": 61.5})
        await worker.call_for(
            job,
            "heartbeat",
            started=True,
            progress={"percent": 30},
            reading={"gpu_temperature_celsius": 62.5},
        )
        await setup.fleet_setup.register("other")
        other, seen = sorted(
            (await get(setup, "workers"))["workers"], key=lambda each: each["worker_id"] == "gpu-7"
        )
    assert (seen["gpu"], seen["gpu_memory_bytes"]) == ("RTX 4090", 24 * 1024**3)
    assert (seen["backend_kind"], other["backend_kind"]) == ("ComfyUI", None)
    ((held),) = seen["jobs"]
    assert (held["job_id"], held["workflow"], held["percent"]) == (job_id, "draw", 30)
    assert other["jobs"] == []


async def test_the_matrix_says_who_can_run_what_and_what_is_missing(setup: EffectSetup) -> None:
    await setup.fleet_setup.register("able", backend=BACKEND)
    await setup.fleet_setup.register("silent")
    told = await get(setup, "matrix")
    rows = {each["worker_id"]: each for each in told["workers"]}
    assert rows["able"]["can_run"] == ["invert"]
    assert rows["able"]["missing"]["draw"]["node_types"] == ["EmptyImage"]
    assert sorted(rows["silent"]["unknown"]) == ["draw", "invert"]
    columns = {each["workflow"]: each for each in told["workflows"]}
    assert columns["invert"] == {
        "workflow": "invert",
        "fleets": ["gpu/production"],
        "able": 1,
        "online": 2,
    }
    assert (columns["draw"]["able"], told["is_whole"]) == (0, True)


async def test_the_command_that_joins_a_worker_has_the_secret_once(setup: EffectSetup) -> None:
    rotated = await setup.fleet_setup.act("fleets/gpu/production/rotate-secret")
    assert f"COMFYFLEET_FLEET_SECRET={rotated['secret']}\n" in rotated["join"]
    assert "comfyfleet worker --control http://control.test --fleet gpu " in rotated["join"]
    later = await get(setup, "fleets/gpu/production")
    assert rotated["secret"] not in later["join"]
    assert "COMFYFLEET_FLEET_SECRET=SECRET" in later["join"]


async def inspected(setup: EffectSetup, data: bytes) -> dict[str, Any]:
    answer = await setup.fleet_setup.admin.post("/api/admin/workflows/inspect", content=data)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_dropped_prompt_is_drawn_and_its_inputs_can_be_exposed(setup: EffectSetup) -> None:
    seen = await inspected(setup, json.dumps(PROMPT).encode())
    assert (seen["form"], seen["file_kind"], seen["document"]) == ("prompt", "json", PROMPT)
    nodes = {each["id"]: each for each in seen["drawing"]["nodes"]}
    assert nodes["1"]["x"] < nodes["2"]["x"] < nodes["3"]["x"]
    links = [(each["from_node"], each["to_node"]) for each in seen["drawing"]["links"]]
    assert links == [("1", "2"), ("2", "3")]
    suggested = {each["name"]: each for each in seen["properties"]}
    assert (suggested["input"]["type"], suggested["input"]["binding"]) == ("image", "1.image")
    assert seen["outputs"][0]["node_id"] == "3"
    wanted = [
        {name: suggested["input"][name] for name in ("name", "type", "binding")},
        {
            name: suggested["filename_prefix"][name]
            for name in ("name", "type", "binding", "default")
        },
    ]
    body = {"slug": "dropped", "document": seen["document"], "properties": wanted}
    made = await setup.fleet_setup.admin.post("/api/admin/workflows", json=body)
    assert made.status_code == 201, made.text


async def test_an_editors_workflow_is_drawn_as_it_was_saved(setup: EffectSetup) -> None:
    workflow = {
        "version": 0.4,
        "nodes": [
            {
                "id": 7,
                "type": "EmptyImage",
                "pos": [10, 20],
                "size": {"0": 210, "1": 80},
                "mode": 4,
                "inputs": [],
                "outputs": [{"name": "IMAGE", "type": "IMAGE", "links": [1]}],
                "widgets_values": [64, 64, 1, 0],
            },
            {
                "id": 8,
                "type": "SaveImage",
                "pos": {"0": 300, "1": 20},
                "size": [200, 90],
                "mode": 0,
                "title": "Keep",
                "inputs": [{"name": "images", "type": "IMAGE", "link": 1}],
                "outputs": [],
                "widgets_values": ["x"],
            },
        ],
        "links": [[1, 7, 0, 8, 0, "IMAGE"]],
        "groups": [{"title": "All", "bounding": [0, 0, 600, 300]}],
    }
    seen = await inspected(setup, json.dumps(workflow).encode())
    first, second = seen["drawing"]["nodes"]
    assert (first["x"], first["width"], first["mode"]) == (10, 210, "bypassed")
    assert (second["x"], second["title"]) == (300, "Keep")
    (link,) = seen["drawing"]["links"]
    assert link == {"from_node": "7", "from_slot": 0, "to_node": "8", "to_slot": 0, "type": "IMAGE"}
    assert seen["drawing"]["groups"][0]["title"] == "All"


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\x89PNG\r\n\x1a\n", b"\xff" * 100])
async def test_a_file_without_a_workflow_is_refused_in_words(
    setup: EffectSetup, data: bytes
) -> None:
    answer = await setup.fleet_setup.admin.post("/api/admin/workflows/inspect", content=data)
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["message"]


async def test_versions_are_drawn_and_compared(setup: EffectSetup) -> None:
    changed = {
        **PROMPT,
        "2": {"class_type": "ImageBlur", "inputs": {"image": ["1", 0], "sigma": 2.0}},
        "3": {**PROMPT["3"], "inputs": {"images": ["2", 0], "filename_prefix": "other"}},
    }
    made = await setup.fleet_setup.register_workflow(
        "invert", document=changed, properties=PROPERTIES[:1], break_effects=True
    )
    assert made.status_code == 201, made.text
    told = await get(setup, "workflows/invert/diff", before=1, after=2)
    assert [each["type"] for each in told["nodes_added"]] == ["ImageBlur"]
    assert [each["type"] for each in told["nodes_removed"]] == ["ImageInvert"]
    assert [each["address"] for each in told["values_changed"]] == ["3.filename_prefix"]
    assert (told["properties_removed"], told["properties_added"]) == (["prefix"], [])
    drawn = await get(setup, "workflows/invert/drawing", version=1)
    assert [each["type"] for each in drawn["nodes"]][1] == "ImageInvert"
    missing = await setup.fleet_setup.admin.get("/api/admin/workflows/invert/diff?before=1&after=9")
    assert missing.status_code == 404


async def test_the_search_finds_things_by_name_and_by_the_beginning_of_an_id(
    setup: EffectSetup,
) -> None:
    ada = await setup.customer()
    job_id = await ada.job(setup.draw)
    await setup.fleet_setup.register("gpu-DRAW-1")

    async def found(q: str) -> set[tuple[str, str]]:
        return {(each["kind"], each["id"]) for each in (await get(setup, "search", q=q))["found"]}

    assert await found("dRaW") == {
        ("effect", "draw"),
        ("workflow", "draw"),
        ("worker", "gpu-DRAW-1"),
    }
    assert ("job", job_id) in await found(job_id)
    assert ("job", job_id) in await found(job_id[:13])
    assert ("job", job_id) not in await found(str(UUID(int=UUID(job_id).int ^ (1 << 127)))[:8])
    assert ("tenant", str(ada.tenant_id)) in await found("ada &")
    assert ("tenant", str(ada.tenant_id)) in await found(str(ada.tenant_id))
    assert await found("100%") == set()
    assert await found("\x00") == set()


async def test_settings_are_shown_without_secrets(setup: EffectSetup) -> None:
    told = await get(setup, "settings")
    assert told["has_editor"] is (find_spec("comfyui_frontend_package") is not None)
    by_name = {each["name"]: each for each in told["settings"]}
    assert by_name["admin_key"]["value"] == "(set)"
    assert ADMIN_KEY not in json.dumps(told)
    assert by_name["metrics_key"]["value"] == ""
    assert all(each["remark"] for each in told["settings"])
    assert by_name["lease_seconds"] == {
        "name": "lease_seconds",
        "variable": "COMFYFLEET_LEASE_SECONDS",
        "value": 900,
        "remark": "how long a lease lasts without a heartbeat",
        "is_default": True,
    }


def test_passwords_inside_urls_are_masked() -> None:
    urls = "a=postgresql://u:hunter2@h/db,b=postgresql://v:pass%40word@h/db?sslmode=on"
    shown = str(masked("tenant_database_urls", urls))
    assert shown == "a=postgresql://u:(set)@h/db,b=postgresql://v:(set)@h/db?sslmode=on"
    assert masked("storage_url", "s3://b/p?secret_key=abc&region=x") == (
        "s3://b/p?secret_key=(set)&region=x"
    )
    assert masked("max_streams_per_key", 50) == 50


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:hun/ter2@h/db", "postgresql://u:(set)@h/db"),
        ("postgresql://u:hun,ter2@h/db", "postgresql://u:(set)@h/db"),
        ("postgresql://u:hun@ter2@h/db", "postgresql://u:(set)@h/db"),
        (
            "a=postgresql://h:5432/db,b=postgresql://u:hun/ter2@h/db",
            "a=postgresql://h:5432/db,b=postgresql://u:(set)@h/db",
        ),
        (
            "a=postgresql:///d?password=hun,ter2,b=postgresql:///e?user=u",
            "a=postgresql:///d?password=(set),b=postgresql:///e?user=u",
        ),
    ],
)
def test_passwords_with_the_signs_of_urls_are_masked(url: str, shown: str) -> None:
    """The database takes them as they are, and viewers read the settings."""
    assert masked("tenant_database_urls", url) == shown


async def test_balances_of_a_tenant_are_listed_page_by_page(setup: EffectSetup) -> None:
    ada = await setup.customer(tokens=7)
    bob = await setup.customer(ada.tenant_id, tokens=9)
    await setup.customer(tokens=11)
    path, after = f"tenants/{ada.tenant_id}/wallets", None
    seen: dict[str, int] = {}
    for _ in range(4):
        page = await get(setup, path, limit=1, **({"after": after} if after else {}))
        seen |= {each["user_id"]: each["balance"] for each in page["wallets"]}
        after = page["next"]
        if after is None:
            break
    assert seen == {str(ada.user_id): 7, str(bob.user_id): 9}


async def test_an_operator_looks_at_what_runs_and_the_audit_says_so(
    setup: EffectSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "PREVIEW_SECONDS", 30.0)
    ada, previews = await setup.customer(), setup.plane.context.previews
    job_id = await ada.job(setup.draw)
    assert await get(setup, f"jobs/{job_id}/preview") == {"preview": None}, "it waits"
    picture = {"node_id": "3", "content_type": "image/png", "base64": "AAAA"}
    async with setup.fleet_setup.worker("gpu-7") as worker:
        job = await worker.job()
        assert job["extra_data"] == {"preview_method": "auto"}, "somebody looks at whatever runs"
        await worker.call_for(job, "heartbeat", started=True)
        assert await setup.fleet_setup.audited("look_at_files") == []
        looking = asyncio.create_task(get(setup, f"jobs/{job_id}/preview"))
        await eventually(lambda: UUID(job_id) in previews.watches_here(), 30)
        told = await worker.call_for(job, "heartbeat", progress={"percent": 1}, preview=picture)
        assert told.json()["previews"] is True
        assert await looking == {"preview": "data:image/png;base64,AAAA"}
        assert len(await setup.fleet_setup.audited("look_at_files")) == 1
        assert not previews._latest, "nothing of it is kept"
        await worker.deliver(job)
    assert await get(setup, f"jobs/{job_id}/preview") == {"preview": None}, "it has ended"
    gone = await setup.fleet_setup.admin.get(f"/api/admin/jobs/{UUID(int=7)}/preview")
    assert gone.status_code == 404


async def test_a_preview_of_a_customers_picture_is_shown_only_where_that_is_audited(
    setup: EffectSetup,
) -> None:
    ada = await setup.customer()
    job_id = await ada.job(setup.draw)
    async with setup.fleet_setup.worker("gpu-7") as worker:
        job = await worker.job()
        progress = {"percent": 30, "preview": "data:image/png;base64,AAAA"}
        await worker.call_for(job, "heartbeat", started=True, progress=progress)
        blind = await get(setup, f"jobs/{job_id}/details", files=False)
        assert (blind["progress"]["percent"], blind["progress"]["preview"]) == (30, None)
        assert await setup.fleet_setup.audited("look_at_files") == []
        shown = await get(setup, f"jobs/{job_id}")
    assert shown["progress"]["preview"] == progress["preview"]
    assert len(await setup.fleet_setup.audited("look_at_files")) == 1
