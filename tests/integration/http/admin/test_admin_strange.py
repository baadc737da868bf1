"""Whatever is sent, the operators' API answers in its own words."""

import httpx
import pytest
from tests.support.jobs.workflows import PROMPT

NUL = "a%00b"


@pytest.mark.parametrize(
    "path",
    [
        f"fleets/{NUL}/{NUL}",
        f"workflows/{NUL}",
        f"workers/{NUL}",
        "tenants/no-uuid",
        f"workers?fleet={NUL}/x",
        f"workers?after={NUL}",
        "audit?limit=0",
    ],
)
async def test_a_name_that_nothing_can_have_is_no_accident(
    client: httpx.AsyncClient, path: str
) -> None:
    answer = await client.get(f"/api/admin/{path}")
    assert answer.status_code in (404, 422)
    assert answer.json()["error"]["message"]


async def test_a_filter_that_nothing_can_fit_finds_nothing(client: httpx.AsyncClient) -> None:
    for name in ("action", "subject", "actor"):
        answer = await client.get(f"/api/admin/audit?{name}={NUL}")
        assert answer.json()["entries"] == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("fleets", {"slug": "a\0b"}),
        ("tenants", {"name": "a\0b"}),
        ("workflows", {"slug": "x", "document": PROMPT, "required_capabilities": ["a\0b"]}),
        ("workflows", {"slug": "x", "document": {"1": {"class_type": "a\0b", "inputs": {}}}}),
        (
            "workflows",
            {
                "slug": "x",
                "document": PROMPT,
                "properties": [
                    {"name": "c", "type": "choice", "binding": "4.text", "choices": ["a\0b"]}
                ],
            },
        ),
    ],
)
async def test_a_text_that_no_database_can_keep_is_refused(
    client: httpx.AsyncClient, path: str, body: dict[str, object]
) -> None:
    answer = await client.post(f"/api/admin/{path}", json=body)
    assert answer.status_code == 422
    assert (await client.get("/api/admin/audit")).json()["entries"] == []


async def test_slugs_that_nothing_can_have_are_not_assigned(client: httpx.AsyncClient) -> None:
    await client.post("/api/admin/fleets", json={"slug": "gpus"})
    answer = await client.put(
        "/api/admin/fleets/gpus/production/workflows", json={"workflow_slugs": ["a\0b"]}
    )
    assert answer.status_code == 422


async def test_the_api_describes_itself(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    for path, methods in (
        ("/api/admin/fleets", {"get", "post"}),
        ("/api/admin/workflows", {"get", "post"}),
        ("/api/admin/fleets/{slug}/{stage}/workflows", {"put"}),
        ("/api/admin/tenants", {"get", "post"}),
        ("/api/admin/workers", {"get"}),
        ("/api/admin/workers/{worker_id}/rotate-token", {"post"}),
        ("/api/admin/audit", {"get"}),
    ):
        assert methods <= paths[path].keys()
