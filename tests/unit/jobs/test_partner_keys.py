"""Keys for paid services are in the memory of one control plane, which gives them to others that lease the job."""

import asyncio
import json
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from comfyfleet.server.jobs import partner_keys
from comfyfleet.server.jobs.partner_keys import PartnerKeys

TENANT = uuid4()
KEYS = {"api_key_comfy_org": "comfyui-0123456789-secret"}


class Planes:
    """Control planes that hear each other at once."""

    def __init__(self, count: int) -> None:
        self.said: list[dict[str, Any]] = []
        self.all = [PartnerKeys(partial(self.tell, number)) for number in range(count)]

    def tell(self, me: int, message: dict[str, Any]) -> None:
        self.said.append(json.loads(json.dumps(message)))
        for number, plane in enumerate(self.all):
            if number != me:
                plane.heard(message)


async def test_another_control_plane_gets_the_keys_and_no_message_shows_them() -> None:
    planes, job_id = Planes(3), uuid4()
    planes.all[0].keep(TENANT, job_id, KEYS)
    # It listens before it asks.
    found = await planes.all[1].get(job_id)
    assert found == KEYS
    assert KEYS["api_key_comfy_org"] not in json.dumps(planes.said)
    assert len(planes.said) == 2


async def test_keys_that_nobody_has_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partner_keys, "ANSWER_SECONDS", 0.01)
    planes, job_id = Planes(2), uuid4()
    assert await planes.all[0].get(job_id) is None
    planes.all[1].keep(TENANT, job_id, KEYS)
    planes.all[0].drop(job_id)
    assert await planes.all[1].get(job_id) is None


async def test_only_who_asked_can_read_the_answer() -> None:
    planes, job_id = Planes(1), uuid4()
    holder = PartnerKeys(planes.said.append)
    holder.keep(TENANT, job_id, KEYS)
    first, second = planes.all[0], PartnerKeys(lambda message: None)
    asking = [asyncio.create_task(each.get(job_id)) for each in (first, second)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    (wanted,) = [dict(message) for message in planes.said]
    holder.heard(wanted)
    answer = planes.said[-1]
    second.heard(answer)
    first.heard(answer)
    assert await asking[0] == KEYS
    assert not asking[1].done()
    asking[1].cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_keys_are_kept_for_a_day_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partner_keys, "KEPT_SECONDS", -1.0)
    kept, job_id = PartnerKeys(lambda message: None, has_others=False), uuid4()
    kept.keep(TENANT, job_id, KEYS)
    assert await kept.get(job_id) is None


async def test_a_tenant_with_many_keys_pushes_out_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partner_keys, "KEPT_MAX", 10)
    kept = PartnerKeys(lambda message: None, has_others=False)
    ours, theirs = [uuid4() for _ in range(3)], [uuid4() for _ in range(30)]
    for job_id in ours:
        kept.keep(TENANT, job_id, KEYS)
    other = uuid4()
    for job_id in theirs:
        kept.keep(other, job_id, KEYS)
    assert [await kept.get(job_id) for job_id in ours] == [KEYS] * 3
    assert [job_id for job_id in theirs if await kept.get(job_id)] == theirs[-7:]


async def test_many_ended_jobs_are_named_in_few_messages() -> None:
    planes, job_ids = Planes(2), [uuid4() for _ in range(250)]
    for job_id in job_ids:
        planes.all[0].keep(TENANT, job_id, KEYS)
    planes.all[1].drop(*job_ids)
    assert len(planes.said) == 3
    assert max(len(json.dumps(message)) for message in planes.said) < 7_500
    assert not planes.all[0]._kept
    assert not planes.all[0]._counts
