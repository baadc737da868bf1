"""Every operation of the API's document, called with whatever fits it and whatever does not.

No answer is ours to apologise for (5xx), and none has a status that the document does not name.
"""

import asyncio
import os
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.core.result import Ok
from tests.support.databases.factory import Databases
from tests.support.server.asgi import free_listener, served, url_of
from tests.support.server.control_plane import ADMIN_KEY, plane_on
from tests.support.server.customers import Customer, EffectSetup, effect_setup_on

from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.middleware import SECRET_HEADER, WrongKeyThrottle
from comfyfleet.transport.fetch import PublicHttpClient

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
MUCH: dict[str, Any] = {
    "calls_per_second": 1e6,
    "calls_at_once": 10**6,
    "max_active_jobs_per_user": 10**6,
}
ANSWER_SECONDS_MAX = 20
EXAMPLES_DEEP = int(os.environ.get("COMFYFLEET_TEST_EXAMPLES", "25"))
CUSTOMERS, ADMIN, WORKER = "/api", "/api/admin", "/api/worker"
REGISTER = "/api/worker/register"
# Answered for as long as the caller listens.
ENDLESS = {"/api/admin/events", "/api/account/events", "/api/graph-runs/events"}
Operation: TypeAlias = APIOperation[Any, Any, Any, Any]


@dataclass
class Stage:
    url: str
    document: dict[str, Any]
    keys: dict[str, str]  # by face
    secret: str  # of the fleet
    known: dict[str, str]  # ids that there are, by the name of their parameter

    def operations(self) -> Iterator[Operation]:
        schema = schemathesis.openapi.from_dict(self.document)
        schema.config.update(base_url=self.url)
        for found in schema.get_all_operations():
            assert isinstance(found, Ok), found
            if found.ok().path.startswith("/api/") and found.ok().path not in ENDLESS:
                yield found.ok()

    def prepare(self, case: Case[Any]) -> None:
        """Some of the ids exist; nobody is kept waiting."""
        if zlib.crc32(repr((case.body, case.query)).encode()) % 2:
            for name in set(case.path_parameters or ()) & self.known.keys():
                case.path_parameters[name] = self.known[name]
            if isinstance(case.body, dict):
                for name in set(case.body) & self.known.keys():
                    case.body[name] = self.known[name]
        if isinstance(case.query, dict) and "wait" in case.query:
            case.query["wait"] = 0
        if isinstance(case.body, dict) and "wait_seconds" in case.body:
            case.body["wait_seconds"] = 0


async def nowhere(host: str, port: int) -> list[str]:
    return ["10.0.0.1"]


async def at_once(seconds: float) -> None: ...


@asynccontextmanager
async def stage_on(databases: Databases, folder: Path) -> AsyncIterator[Stage]:
    async with plane_on(databases, folder, **MUCH) as opened:
        plane = replace(opened, outward=PublicHttpClient(resolver=nowhere))
        async with effect_setup_on(plane) as effect_setup:
            listener, app = free_listener(), create_app(plane)
            # Many of the calls have a wrong key, which is answered later each time.
            app.state.wrong_keys = WrongKeyThrottle(sleep=at_once)
            ada = await effect_setup.customer(tokens=10**9)
            joined = await effect_setup.fleet_setup.register("w1")
            async with served(app, listener):
                yield Stage(
                    url=url_of(listener),
                    document=app.openapi(),
                    keys={CUSTOMERS: ada.key, ADMIN: ADMIN_KEY, WORKER: joined.json()["token"]},
                    secret=effect_setup.fleet_setup.secret,
                    known=await known_ids(effect_setup, ada),
                )


async def known_ids(effect_setup: EffectSetup, ada: Customer) -> dict[str, str]:
    """Of things that have ended: whoever follows them gets an answer at once."""
    ended = await ada.job(effect_setup.draw)
    await ada.client.delete(f"/api/ai-jobs/{ended}")
    items = {"effect_id": str(effect_setup.draw.id), "items": [{}, {}]}
    batch = (await ada.client.post("/api/ai-jobs/batches", json=items)).json()["id"]
    await ada.client.delete(f"/api/ai-jobs/batches/{batch}")
    hook = await ada.client.post("/api/webhooks", json={"url": "https://93.184.216.34/"})
    return {
        "job_id": ended,
        "batch_id": batch,
        "effect_id": str(effect_setup.draw.id),
        "video_id": await ada.video(),
        "file_id": await ada.upload(),
        "webhook_id": hook.json()["id"],
        "tenant_id": str(ada.tenant_id),
        "user_id": str(ada.user_id),
        "slug": "gpu",
        "stage": "production",
        "worker_id": "w1",
    }


def face_of(operation: Operation) -> str:
    return next((each for each in (ADMIN, WORKER) if operation.path.startswith(each)), CUSTOMERS)


def problems_of(stage: Stage, faces: set[str], examples: int, *, is_random: bool) -> list[str]:
    session = requests.Session()
    found = []
    for operation in stage.operations():
        if face_of(operation) not in faces:
            continue
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            try:
                call(stage, session, operation, mode, examples, is_random=is_random)
            except Unsatisfiable:
                # A call without parameters, body and key can't be wrong.
                assert mode is GenerationMode.NEGATIVE, operation.label
                assert not any((operation.body, *operation.iter_parameters())), operation.label
            except (FailureGroup, Failure) as error:
                found.append(f"{operation.label} {mode.value}: {error}")
    return found


def call(
    stage: Stage,
    session: requests.Session,
    operation: Operation,
    mode: GenerationMode,
    examples: int,
    *,
    is_random: bool,
) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=not is_random,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Case[Any]) -> None:
        stage.prepare(case)
        headers = {"Authorization": f"Bearer {stage.keys[face_of(operation)]}"}
        if operation.path == REGISTER:
            headers = {SECRET_HEADER: stage.secret}
        response = case.call(
            base_url=stage.url, session=session, headers=headers, timeout=ANSWER_SECONDS_MAX
        )
        case.validate_response(response, checks=CHECKS)

    one()


async def test_customers_calls_of_all_kinds_are_answered_as_the_document_says(
    postgres_databases: Databases, tmp_path: Path
) -> None:
    async with stage_on(postgres_databases, tmp_path) as stage:
        found = await asyncio.to_thread(problems_of, stage, {CUSTOMERS}, 2, is_random=False)
    assert not found, "\n\n".join(found)


@pytest.mark.slow
async def test_calls_of_all_faces_are_answered_as_the_document_says(
    databases: Databases, tmp_path: Path
) -> None:
    faces = {CUSTOMERS, ADMIN, WORKER}
    async with stage_on(databases, tmp_path) as stage:
        found = await asyncio.to_thread(problems_of, stage, faces, EXAMPLES_DEEP, is_random=True)
    assert not found, "\n\n".join(found)
