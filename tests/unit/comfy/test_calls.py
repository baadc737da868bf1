import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from comfyfleet.comfy.backend import BackendLimits
from comfyfleet.comfy.calls import LATENCIES_KEPT_MAX, BackendCalls, CallTally
from comfyfleet.errors import ServerUnavailable, UnexpectedAnswer
from comfyfleet.transport.http import Call
from comfyfleet.transport.retry import RetryPolicy

CALL = Call("GET", "/history/{id}", path="/history/abc", params={"key": "secret"})


class Wire:
    """Answers in order; counts the naps in between."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = [*answers]
        self.naps: list[float] = []
        self.tally = CallTally()

    def calls(self) -> BackendCalls:
        client = httpx.AsyncClient(
            base_url="http://server:1", transport=httpx.MockTransport(self._answer)
        )
        retry = RetryPolicy(sleep=self._nap, chance=lambda: 0.0)
        return BackendCalls(client, limits=BackendLimits(), meter=self.tally, retry=retry)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _nap(self, seconds: float) -> None:
        self.naps.append(seconds)


def error(kind: Callable[[str], Exception] = httpx.ConnectError) -> Exception:
    return kind("no")


async def test_what_may_be_repeated_is_until_it_is_answered() -> None:
    wire = Wire(error(), error(httpx.ReadTimeout), httpx.Response(503), httpx.Response(200))
    assert (await wire.calls().ask(CALL)).status_code == 200
    assert wire.naps == [0.125, 0.25, 0.5]
    assert wire.tally.failures == {"GET /history/{id}": 3}
    assert wire.tally.successes == {"GET /history/{id}": 1}
    assert len(wire.tally.latencies["GET /history/{id}"]) == 4


async def test_retries_have_an_end_that_names_the_trouble() -> None:
    wire = Wire(*[error()] * 4)
    with pytest.raises(ServerUnavailable, match="at server:1 failed: no"):
        await wire.calls().ask(CALL)
    assert wire.answers == []


async def test_a_server_that_keeps_failing_is_told_with_its_words() -> None:
    wire = Wire(*[httpx.Response(500, text="out of order")] * 4)
    with pytest.raises(ServerUnavailable, match="500: out of order"):
        await wire.calls().ask(CALL)


async def test_what_is_not_json_is_told_and_counted() -> None:
    wire = Wire(httpx.Response(200, text="<html>"))
    with pytest.raises(UnexpectedAnswer, match="<html>"):
        await wire.calls().ask_json(CALL)
    assert wire.tally.unexpected_answers == {"GET /history/{id}": 1}


async def test_every_call_is_logged_without_secrets(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "comfyfleet.comfy.calls")
    await Wire(error(), httpx.Response(404)).calls().ask(CALL)
    failed, answered = (_fields(record) for record in caplog.records)
    assert (failed["status"], failed["failure"]) == (None, "no")
    assert (answered["method"], answered["path"], answered["status"]) == (
        "GET",
        "/history/abc",
        404,
    )
    assert isinstance(answered["duration_ms"], float)
    assert "secret" not in str(failed) + str(answered)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return record.__dict__


def test_a_tally_forgets_old_latencies() -> None:
    tally = CallTally()
    for _ in range(LATENCIES_KEPT_MAX + 10):
        tally.called("GET /", ok=True, seconds=0.1)
    assert len(tally.latencies["GET /"]) == LATENCIES_KEPT_MAX
