"""A prompt is sent to a cloud once, whatever becomes of the answer."""

import json
from typing import Any

import pytest
from tests.integration.comfy.clouds import (
    EMPTY_QUEUE,
    JOB,
    MARKED,
    PROMPT,
    RUN,
    V1,
    V2,
    cloud_of,
    job,
)
from tests.support.backends.scripted_server import Cut, Reaction, Reply, json_reply

from comfyfleet.comfy import Submitted
from comfyfleet.errors import (
    CreditsExhausted,
    InvalidValue,
    OutcomeUnknown,
    PromptRefused,
    ServerUnavailable,
    UnexpectedAnswer,
)

ACCEPTED = json_reply({"prompt_id": JOB, "number": 1, "node_errors": {}})
QUEUED = json_reply({"queue_running": [], "queue_pending": [[1, JOB, MARKED, ["1"], {}]]})
REFUSED_KEY = json_reply({"error": {"code": "idempotency_key_reuse", "message": "used"}}, 422)
ADOPTED = Submitted(JOB, adopted=True)
LOST_ANSWERS: list[Reaction] = [Cut(), Reply(502), Reply(200, b'{"prompt_id": "', sent_bytes_max=5)]


def listed(*jobs: dict[str, Any]) -> Reply:
    return json_reply({"jobs": list(jobs), "truncated": False})


async def test_v1_is_sent_with_our_sign_in_prompt_and_extra_data() -> None:
    async with cloud_of({**V1, "POST /api/prompt": ACCEPTED}) as stage:
        submitted = await stage.cloud.submit(PROMPT, prompt_id=RUN, extra_data={"x": 1})
    (sent,) = (json.loads(asked.body) for asked in stage.server.asked if asked.method == "POST")
    assert submitted == Submitted(JOB)
    assert sent["prompt"] == MARKED
    assert sent["extra_data"]["x"] == 1
    assert RUN in sent["extra_data"]["comfyfleet_run"]


@pytest.mark.parametrize("lost", LOST_ANSWERS)
async def test_v1_a_submit_without_an_answer_is_found_in_the_queue(lost: Reaction) -> None:
    replies = {**V1, "POST /api/prompt": lost, "GET /api/queue": [EMPTY_QUEUE, QUEUED]}
    async with cloud_of(replies) as stage:
        assert await stage.cloud.submit(PROMPT, prompt_id=RUN) == ADOPTED
    assert stage.server.paths() == ["/api/prompt"]


async def test_v1_a_submit_without_an_answer_is_found_among_the_ended() -> None:
    replies = {
        **V1,
        "POST /api/prompt": Cut(),
        "GET /api/jobs": json_reply({"jobs": [{"id": "other"}, {"id": JOB}], "pagination": {}}),
        "GET /api/jobs/other": json_reply({"id": "other", "workflow": PROMPT}),
        f"GET /api/jobs/{JOB}": json_reply({"id": JOB, "workflow": MARKED}),
    }
    async with cloud_of(replies) as stage:
        assert await stage.cloud.submit(PROMPT, prompt_id=RUN) == ADOPTED
    assert stage.server.paths() == ["/api/prompt"]


@pytest.mark.parametrize("lost", LOST_ANSWERS)
async def test_v1_what_can_not_be_decided_is_unknown_and_not_sent_again(lost: Reaction) -> None:
    async with cloud_of({**V1, "POST /api/prompt": lost}) as stage:
        with pytest.raises(OutcomeUnknown) as caught:
            await stage.cloud.submit(PROMPT, prompt_id=RUN)
    assert caught.value.details["prompt_id"] == RUN
    assert stage.server.paths() == ["/api/prompt"]


async def test_v1_ended_jobs_of_others_are_asked_for_once() -> None:
    replies = {
        **V1,
        "POST /api/prompt": Cut(),
        "GET /api/jobs": json_reply({"jobs": [{"id": "other"}], "pagination": {"has_more": True}}),
        "GET /api/jobs/other": json_reply({"id": "other", "workflow": PROMPT}),
    }
    async with cloud_of(replies) as stage:
        with pytest.raises(OutcomeUnknown):
            await stage.cloud.submit(PROMPT, prompt_id=RUN)
    assert stage.server.paths("GET").count("/api/jobs") == 3
    assert stage.server.paths("GET").count("/api/jobs/other") == 1


async def test_v1_a_search_that_fails_decides_nothing() -> None:
    replies = {
        **V1,
        "POST /api/prompt": Cut(),
        "GET /api/queue": json_reply({"queue_running": None}),
    }
    async with cloud_of(replies) as stage:
        with pytest.raises(OutcomeUnknown):
            await stage.cloud.submit(PROMPT, prompt_id=RUN)
    assert stage.server.paths() == ["/api/prompt"]


async def test_v1_a_run_is_not_said_to_be_absent_when_older_jobs_were_not_searched() -> None:
    more = json_reply({"jobs": [], "pagination": {"has_more": True}})
    async with cloud_of({**V1, "GET /api/jobs": more}) as stage:
        with pytest.raises(OutcomeUnknown):
            await stage.cloud.adopt(RUN)
    async with cloud_of(V1) as stage:
        assert await stage.cloud.adopt(RUN) is None


async def test_v1_a_prompt_that_would_run_in_part_is_taken_back() -> None:
    problem = {"errors": [{"type": "t", "message": "m"}], "class_type": "A"}
    partly = json_reply({"prompt_id": JOB, "number": 1, "node_errors": {"1": problem}})
    states = [json_reply({"status": "executing"}), json_reply({"status": "cancelled"})]
    replies = {
        **V1,
        "POST /api/prompt": partly,
        f"GET /api/job/{JOB}/status": states,
        f"GET /api/jobs/{JOB}": json_reply({"id": JOB}),
        f"POST /api/jobs/{JOB}/cancel": json_reply({"cancelled": True}),
    }
    async with cloud_of(replies) as stage:
        with pytest.raises(PromptRefused, match="node 1"):
            await stage.cloud.submit(PROMPT, prompt_id=RUN)
    assert stage.server.paths()[-1] == f"/api/jobs/{JOB}/cancel"


async def test_v1_a_prompt_that_can_not_be_taken_back_is_refused_all_the_same() -> None:
    problem = {"errors": [{"type": "t", "message": "m"}], "class_type": "A"}
    partly = json_reply({"prompt_id": JOB, "number": 1, "node_errors": {"1": problem}})
    replies = {**V1, "POST /api/prompt": partly, f"GET /api/job/{JOB}/status": Reply(500)}
    async with cloud_of(replies) as stage:
        with pytest.raises(PromptRefused, match="node 1"):
            await stage.cloud.submit(PROMPT, prompt_id=RUN)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (json_reply({"code": "X", "message": "no credits"}, 402), CreditsExhausted),
        (json_reply({"code": "X", "message": "User has not paid"}, 429), CreditsExhausted),
        (json_reply({"code": "X", "message": "Rate limit exceeded"}, 429), ServerUnavailable),
        (json_reply({"code": "BAD_REQUEST", "message": "no prompt"}, 400), PromptRefused),
        (json_reply({"message": "what?"}, 418), UnexpectedAnswer),
    ],
)
async def test_v1_a_refusal_is_told_as_what_it_is(reply: Reply, error: type[Exception]) -> None:
    async with cloud_of({**V1, "POST /api/prompt": reply}) as stage:
        with pytest.raises(error):
            await stage.cloud.submit(PROMPT, prompt_id=RUN)
    assert stage.server.paths() == ["/api/prompt"]


async def test_v2_a_repeat_that_is_refused_means_that_it_was_received() -> None:
    replies = {
        **V2,
        "POST /api/v2/jobs": [Cut(), REFUSED_KEY],
        "GET /api/v2/jobs": listed(job("queued", id="other"), job("running")),
        "GET /api/v2/jobs/other/workflow": json_reply({"workflow": PROMPT, "format": "api"}),
        f"GET /api/v2/jobs/{JOB}/workflow": json_reply({"workflow": MARKED, "format": "api"}),
    }
    async with cloud_of(replies) as stage:
        assert await stage.cloud.submit(PROMPT, prompt_id=RUN) == ADOPTED
    keys = [asked.headers["idempotency-key"] for asked in stage.server.asked if asked.body]
    assert keys == [RUN, RUN]


async def test_v2_a_repeat_that_is_taken_was_not_received_before() -> None:
    replies = {**V2, "POST /api/v2/jobs": [Cut(), json_reply(job("queued"), 201)]}
    async with cloud_of(replies) as stage:
        assert await stage.cloud.submit(PROMPT, prompt_id=RUN) == Submitted(JOB)


@pytest.mark.parametrize("jobs", [listed(), Reply(404)])
async def test_v2_what_was_received_and_is_not_found_is_unknown(jobs: Reply) -> None:
    replies = {**V2, "POST /api/v2/jobs": REFUSED_KEY, "GET /api/v2/jobs": jobs}
    async with cloud_of(replies) as stage:
        with pytest.raises(OutcomeUnknown):
            await stage.cloud.submit(PROMPT, prompt_id=RUN)
    assert stage.server.paths() == ["/api/v2/jobs"]


async def test_v2_never_answered_is_unknown_too() -> None:
    replies = {**V2, "POST /api/v2/jobs": Cut(), "GET /api/v2/jobs": listed()}
    async with cloud_of(replies) as stage:
        with pytest.raises(OutcomeUnknown):
            await stage.cloud.submit(PROMPT, prompt_id=RUN)


async def test_v2_takes_of_the_extra_data_only_what_it_knows() -> None:
    async with cloud_of({**V2, "POST /api/v2/jobs": json_reply(job("queued"), 201)}) as stage:
        extra = {"api_key_comfy_org": "k", "extra_pnginfo": {}}
        await stage.cloud.submit(PROMPT, prompt_id=RUN, extra_data=extra)
    (sent,) = (json.loads(asked.body) for asked in stage.server.asked if asked.body)
    assert sent == {"workflow": MARKED, "extra_data": {"api_key_comfy_org": "k"}}


async def test_a_cloud_that_asks_to_wait_is_waited_for() -> None:
    full = json_reply({"error": {"code": "queue_full", "message": "full"}}, 429, retry_after="7")
    date = "Wed, 21 Oct 2026 07:28:0{} GMT"
    moment = {"date": date.format(0), "retry_after": date.format(9)}
    replies = {
        **V2,
        "POST /api/v2/jobs": [full, json_reply({}, 429, **moment), json_reply(job("queued"), 201)],
    }
    async with cloud_of(replies) as stage:
        assert await stage.cloud.submit(PROMPT, prompt_id=RUN) == Submitted(JOB)
    assert stage.naps == [7, 9]


async def test_a_cloud_that_asks_for_an_hour_is_not_waited_for() -> None:
    full = json_reply({"error": {"code": "queue_full", "message": "full"}}, 429, retry_after="3600")
    async with cloud_of({**V2, "POST /api/v2/jobs": full}) as stage:
        with pytest.raises(ServerUnavailable) as caught:
            await stage.cloud.submit(PROMPT, prompt_id=RUN)
    assert caught.value.details["retry_after_seconds"] == 3600
    assert (stage.naps, stage.server.paths()) == ([], ["/api/v2/jobs"])


@pytest.mark.parametrize("prompt_id", ["", "x", RUN.upper()])
async def test_an_id_that_is_no_uuid_in_lower_case_is_not_sent(prompt_id: str) -> None:
    async with cloud_of(V2) as stage:
        with pytest.raises(InvalidValue):
            await stage.cloud.submit(PROMPT, prompt_id=prompt_id)
    assert stage.server.asked == []


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"prompt_id": 7}', b"<html>"])
async def test_an_odd_answer_to_a_submit_is_counted_and_looked_into(answer: bytes) -> None:
    replies = {**V1, "POST /api/prompt": Reply(200, answer), "GET /api/queue": QUEUED}
    async with cloud_of(replies) as stage:
        assert await stage.cloud.submit(PROMPT, prompt_id=RUN) == ADOPTED
    assert stage.tally.unexpected_answers["POST /prompt"] == 1
    assert stage.server.paths() == ["/api/prompt"]
