"""The worker's HTTP client for the control plane: ten calls."""

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import TypeAlias, TypeVar

import httpx
from pydantic import ValidationError

from comfyfleet.api.route_calls import RouteAnswer, RoutePoll, RoutePolled
from comfyfleet.api.values import Message
from comfyfleet.api.worker import (
    Complete,
    Completed,
    Deregister,
    Done,
    FactsReport,
    FactsReported,
    Fail,
    Heartbeat,
    HeartbeatAnswer,
    Poll,
    Polled,
    Register,
    Registered,
    Requeue,
)
from comfyfleet.errors import (
    Conflict,
    FleetError,
    FleetFull,
    InvalidInput,
    LeaseLost,
    OutputMissing,
    Refused,
    Unauthenticated,
    Unavailable,
    WorkerRevoked,
)
from comfyfleet.transport.error_decoder import error_fields
from comfyfleet.transport.http import Call, HttpClient, describe_network_error, open_client
from comfyfleet.transport.retry import RetryPolicy
from comfyfleet.worker.secrets import JobSecrets, hide_in_values
from comfyfleet.worker.settings import HEARTBEAT_SECONDS

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 30.0
# A control plane is considered hung if it doesn't respond for this many heartbeat intervals. This
# time is at least SILENCE_SECONDS_MIN and at most SILENCE_SECONDS_MAX.
HEARTBEATS_MISSED_MAX = 2
SILENCE_SECONDS_MIN = 10.0
SILENCE_SECONDS_MAX = 60.0
# Maximum seconds that a call waits at the control plane. Many proxies cut an idle connection after
# a minute.
WAIT_SECONDS_MAX = 50.0
# A call waits for at most this share of `silence_seconds`.
WAIT_SHARE = 0.75
DEREGISTER_ATTEMPTS_MAX = 4
SNIPPET_CHARACTERS_MAX = 500
# Client errors that may be temporary.
RETRYABLE_STATUSES = frozenset({408, 425, 429})
# Calls that don't concern a job. A call about a job may fail just because the database of the job's
# tenant is down, so it doesn't mark the address as failed.
ENDPOINTS_WITHOUT_JOB = frozenset({"register", "poll", "deregister"})

FinalReport: TypeAlias = Complete | Fail | Requeue
REPORT_ENDPOINTS: Mapping[type[Message], str] = {
    Complete: "complete",
    Fail: "fail",
    Requeue: "requeue",
}
Answer = TypeVar("Answer", bound=Message)


class _Address:
    """One address of the control plane, with its connections."""

    def __init__(self, url: str, retry: RetryPolicy) -> None:
        self.url = url
        client = open_client(f"{url}/api/worker", answer_seconds=ANSWER_SECONDS)
        self.calls = HttpClient(client, retry=retry)
        self.answered_at = float("-inf")


class ControlClient:
    """Calls the control plane. `key` comes from `register`.

    A call without a key or with an expired one raises Unauthenticated, or WorkerRevoked if an
    operator revoked this worker. All calls raise Unavailable if no control plane responds.
    """

    def __init__(
        self,
        *urls: str,
        key: str | None = None,
        retry: RetryPolicy | None = None,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        """`urls` lists all addresses of the control plane. If one doesn't respond, the client
        switches to the next."""
        self.key = key
        self.heartbeat_seconds = heartbeat_seconds
        self.secrets = JobSecrets()
        # Addresses that have failed since any address last responded.
        self._failed: set[_Address] = set()
        self._retry = retry or RetryPolicy()
        self._addresses = [_Address(url.rstrip("/"), self._retry) for url in urls]

    @property
    def _url(self) -> str:
        return self._addresses[0].url

    @property
    def silence_seconds(self) -> float:
        """Seconds without a response after which another address is tried."""
        silence = HEARTBEATS_MISSED_MAX * self.heartbeat_seconds
        return min(max(silence, SILENCE_SECONDS_MIN), SILENCE_SECONDS_MAX)

    @property
    def wait_seconds(self) -> float:
        """Maximum seconds that a poll may wait for a job."""
        return min(WAIT_SHARE * self.silence_seconds, WAIT_SECONDS_MAX)

    @property
    def _answer_seconds(self) -> float:
        """The read timeout of a call that doesn't wait."""
        return min(ANSWER_SECONDS, self.silence_seconds)

    async def aclose(self) -> None:
        for address in self._addresses:
            await address.calls.client.aclose()

    async def register(self, message: Register, secret: str) -> Registered:
        """Registers the worker and stores its key. Raises Unauthenticated, InvalidInput, Conflict
        (the id is taken) and FleetFull."""
        headers = {"X-Fleet-Secret": secret}
        registered = await self._ask("register", message, Registered, headers)
        self.key = registered.token
        return registered

    async def poll(self, message: Poll) -> Polled:
        seconds = max(self.silence_seconds, message.wait_seconds / WAIT_SHARE)
        return await self._ask("poll", message, Polled, self._bearer(), seconds)

    async def heartbeat(self, message: Heartbeat) -> HeartbeatAnswer:
        """Sends one heartbeat. Raises LeaseLost."""
        seconds = max(self._answer_seconds, message.wait_seconds / WAIT_SHARE)
        return await self._ask("heartbeat", message, HeartbeatAnswer, self._bearer(), seconds)

    async def end(self, report: FinalReport) -> Completed:
        """Retries the final report until the control plane responds, however long that takes,
        because the work has been done and paid for.

        Raises LeaseLost, or Refused if the control plane understood the report but didn't accept
        it.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self.send_report(report)
            except (Unavailable, Unauthenticated) as error:
                await self._wait(attempt, report, error)

    async def send_report(self, report: FinalReport) -> Completed:
        """Sends the final report once. Control planes that don't support the `poll` field of
        Complete ignore it."""
        try:
            return await self._ask(
                REPORT_ENDPOINTS[type(report)], report, Completed, self._bearer()
            )
        except (WorkerRevoked, Conflict) as error:
            raise LeaseLost(error.message) from error

    async def report_facts(self, message: FactsReport) -> FactsReported:
        return await self._ask("facts", message, FactsReported, self._bearer())

    async def poll_routes(self, message: RoutePoll) -> RoutePolled:
        seconds = max(self.silence_seconds, message.wait_seconds / WAIT_SHARE)
        return await self._ask("routes", message, RoutePolled, self._bearer(), seconds)

    async def answer_route(self, answer: RouteAnswer) -> None:
        """Sends the answer of a route call. Raises Refused if its caller is no longer waiting."""
        await self._ask("routes/answer", answer, Done, self._bearer())

    async def deregister(self, worker_id: str) -> bool:
        """Deregisters the worker and returns whether the control plane accepted that. Makes only a
        few attempts, because a stopping worker has little time."""
        for attempt in range(1, DEREGISTER_ATTEMPTS_MAX + 1):
            try:
                await self._ask("deregister", Deregister(worker_id=worker_id), Done, self._bearer())
            except Unavailable:
                await self._retry.back_off(attempt)
            except FleetError as error:
                logger.warning("deregistration was refused", extra={"reason": error.message})
                return False
            else:
                return True
        return False

    async def _wait(self, attempt: int, report: FinalReport, error: FleetError) -> None:
        if attempt in (1, 2, 4) or attempt % 8 == 0:
            logger.warning(
                "the control plane did not accept a final report; sending it again",
                extra={
                    "report": REPORT_ENDPOINTS[type(report)],
                    "dispatch_id": report.dispatch_id,
                    "attempt": attempt,
                    "reason": error.message,
                },
            )
        await self._retry.back_off(min(attempt, 6))

    def _note_failure(self, address: "_Address", reason: str, *, leaves: bool) -> None:
        """Logs once that an address doesn't respond. `leaves` means that the next address is used
        from now on."""
        if self._addresses[0] is not address:
            return  # another call has already switched the address
        if leaves:
            self._addresses.append(self._addresses.pop(0))
        if address in self._failed:
            return
        self._failed.add(address)
        if self._addresses[0] in self._failed:
            logger.warning("the control plane at %s isn't responding: %s", address.url, reason)
        else:
            text = "the control plane at %s isn't responding (%s); using %s"
            logger.warning(text, address.url, reason, self._url)

    def _note_answer(self, address: "_Address") -> None:
        is_back = address in self._failed
        self._failed.clear()
        if is_back:
            logger.warning("the control plane at %s is responding again", address.url)

    def _bearer(self) -> dict[str, str]:
        if not self.key:
            raise Unauthenticated("this worker isn't registered yet")
        return {"Authorization": f"Bearer {self.key}"}

    async def _ask(
        self,
        endpoint: str,
        message: Message,
        kind: type[Answer],
        headers: Mapping[str, str],
        read_seconds: float | None = None,
    ) -> Answer:
        """Sends a message to the current address. Logs once when an address stops responding, and
        once when it responds again."""
        address, began = self._addresses[0], asyncio.get_running_loop().time()
        try:
            answer = await self._ask_once(address, endpoint, message, kind, headers, read_seconds)
        except Unavailable as error:
            is_slow = isinstance(error.__cause__, httpx.ReadTimeout)
            if is_slow and address.answered_at > began:
                logger.info("%s (the address still responds to other calls)", error.message)
            elif error.__cause__ is not None or endpoint in ENDPOINTS_WITHOUT_JOB:
                is_silent = isinstance(error.__cause__, httpx.TransportError)
                self._note_failure(address, error.message, leaves=is_silent)
            raise
        except FleetError:
            self._note_answer(address)
            raise
        self._note_answer(address)
        return answer

    def _content(self, message: Message) -> str:
        text = message.model_dump_json(exclude_none=True)
        secrets = self.secrets.of(getattr(message, "lease_token", None))
        return json.dumps(hide_in_values(json.loads(text), secrets)) if secrets else text

    async def _ask_once(
        self,
        address: "_Address",
        endpoint: str,
        message: Message,
        kind: type[Answer],
        headers: Mapping[str, str],
        read_seconds: float | None,
    ) -> Answer:
        call = Call(
            "POST",
            f"/{endpoint}",
            content=self._content(message),
            headers={**headers, "Content-Type": "application/json"},
            read_seconds=read_seconds or self._answer_seconds,
        )
        try:
            response = await address.calls.once(call)
        except httpx.TransportError as error:
            raise Unavailable(
                f"{endpoint} at {address.url}: {describe_network_error(error)}"
            ) from error
        address.answered_at = asyncio.get_running_loop().time()
        if response.status_code // 100 != 2:
            raise error_from_response(endpoint, response)
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            # The response is usually an error page of a proxy, and the control plane itself may be
            # back soon.
            raise Unavailable(f"{endpoint}: the response has an unknown format: {error}") from error


def error_from_response(endpoint: str, response: httpx.Response) -> FleetError:
    """Builds an error from a response's status and its `{"error": {code, message}}`."""
    fields = error_fields(response)
    code = fields.code if fields else ""
    message = fields.message if fields else response.text[:SNIPPET_CHARACTERS_MAX]
    text = f"{endpoint} failed with status {response.status_code}: {message}"
    match response.status_code:
        case 401:
            return WorkerRevoked(text) if code == WorkerRevoked.code else Unauthenticated(text)
        case 409:
            return LeaseLost(text) if code == LeaseLost.code else Conflict(text)
        case 429 if endpoint == "register":
            return FleetFull(text)
        case 400 | 404 | 422 if endpoint == "register":
            return InvalidInput(text)
        case 422 if code == OutputMissing.code:
            return OutputMissing("The workflow produced neither files nor values.", status=422)
        case status if status >= 500 or status in RETRYABLE_STATUSES or status < 400:
            return Unavailable(text)
    return Refused(text, status=response.status_code)
