"""What the other tests of the gateway stand on: servers in this process and in another, and their users."""

import asyncio
from pathlib import Path

from tests.support.backends.engine_client import EngineClient
from tests.support.databases.factory import Databases
from tests.support.server.gateway import PROMPT, GatewayProcess, GatewayUser, gateway_on


def test_a_prompt_runs_and_its_client_hears_of_it(talk: EngineClient) -> None:
    ear = talk.listen("me")
    prompt_id = talk.submit(PROMPT, client_id="me")
    ear.wait("execution_success", {"prompt_id": prompt_id})
    ear.wait("executing", {"node": None})
    assert talk.history(prompt_id)["status"]["completed"]


def test_users_see_their_own_prompts_only(gateway: GatewayProcess, user: GatewayUser) -> None:
    colleague = gateway.user(user.tenant_id)
    with user.open_engine_client() as talk, colleague.open_engine_client() as other:
        talk.submit(PROMPT)
        talk.wait_idle()
        assert len(talk.http.get("/history").json()) == 1
        assert other.http.get("/history").json() == {}


async def test_a_control_plane_in_this_process_runs_prompts(
    databases: Databases, tmp_path: Path
) -> None:
    async with gateway_on(databases, tmp_path) as server:
        user = await server.new_user()

        def run() -> str:
            with user.open_engine_client() as talk:
                prompt_id = talk.submit(PROMPT)
                talk.wait_idle()
                return str(talk.history(prompt_id)["status"]["status_str"])

        assert await asyncio.to_thread(run) == "success"
