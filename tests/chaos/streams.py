"""Customers who keep event streams and WebSockets open while faults occur, and who upload files."""

import asyncio
import contextlib
import io
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from copy import deepcopy
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid5

import httpx
from PIL import Image
from tests.chaos.load import ANSWER_SECONDS_MAX, OVER, PAUSE_SECONDS, Customer, Over, prompt_of
from tests.chaos.network import jitter
from tests.support.jobs.large_graph import TURN
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

SILENT_SECONDS_MAX = 40.0  # a stream sends a comment at least every 15 seconds
MESSAGE_SECONDS, SOCKET_SECONDS_MAX = 1.0, 20.0
PICTURE_PIXELS = 96
CUT_CHANCE = 0.6
STEPS_OF_PROMPTS = (2, 80)


class StreamCustomer(Customer):
    """Follows each job by its event stream, and reconnects after the last event when the stream breaks."""

    async def act(self, key: str, color: int) -> None:
        body = {
            "effect_id": self.things["effect"],
            "idempotency_key": key,
            "properties": {"color": color, "steps": 6},
        }
        job = await self.submit("/api/ai-jobs", body)
        self.accept("job", job["id"])
        await self._follow(job["id"])

    async def _follow(self, job_id: str) -> None:
        ids: list[int] = []
        ends: list[str] = []
        while not self.is_over:
            headers = {"Last-Event-ID": str(ids[-1])} if ids else {}
            with contextlib.suppress(httpx.TransportError, TimeoutError):
                if not await self._read(job_id, headers, ids, ends):
                    break
            self.tally.answers["stream opened"] += 1
            await asyncio.sleep(jitter(self.chance, PAUSE_SECONDS))
        if ids != sorted(set(ids)):
            self.tally.wrong.append(f"job {job_id}: its stream repeated or mixed events: {ids}")
        if not self.is_over and len(ends) != 1:
            self.tally.wrong.append(f"job {job_id}: its stream has the ends {ends}")
        self.tally.ended += not self.is_over

    async def _read(
        self, job_id: str, headers: dict[str, str], ids: list[int], ends: list[str]
    ) -> bool:
        """Reads until the stream ends or breaks; False means that nothing can follow."""
        path = f"/api/ai-jobs/{job_id}/events"
        timeout = httpx.Timeout(ANSWER_SECONDS_MAX, read=SILENT_SECONDS_MAX)
        async with self.http.stream("GET", path, headers=headers, timeout=timeout) as answer:
            self.tally.answers[str(answer.status_code)] += 1
            if answer.status_code == 500:
                self.tally.errors.append(f"GET {path}: {(await answer.aread())[:300]!r}")
            if answer.status_code == 204:
                return bool(not ends)
            if answer.status_code == 200:
                async for event in _events(answer):
                    if "id" in event:
                        ids.append(int(event["id"]))
                    if (
                        event.get("event") == "status"
                        and json.loads(event["data"]).get("status") in OVER
                    ):
                        ends.append(event["data"])
                    if self.is_over:
                        break
        return not ends


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, str]]:
    event: dict[str, str] = {}
    async for line in answer.aiter_lines():
        if not line and event:
            yield event
            event = {}
        name, colon, value = line.partition(":")
        if name and colon:
            event[name] = value.removeprefix(" ")


class SocketCustomer(Customer):
    """Sends prompts, and follows them by a WebSocket like ComfyUI's own page."""

    async def act(self, key: str, color: int) -> None:
        prompt_id = str(UUID(int=self.chance.getrandbits(128), version=4))
        counts: Counter[str] = Counter()
        listening = asyncio.create_task(self._listen(prompt_id, counts))
        try:
            answer = await self.ask(
                "POST",
                "/prompt",
                json={
                    "prompt": self._prompt(color),
                    "prompt_id": prompt_id,
                    "client_id": self.name,
                },
            )
            if answer.status_code != 200:
                self.tally.wrong.append(f"POST /prompt was refused: {answer.text[:300]}")
                raise Over
            job_id = uuid5(UUID(self.user_id), f"{self.tenant_id}/{prompt_id}")
            self.accept("prompt", str(job_id), prompt_id)
            await self._until_in_history(prompt_id)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        repeated = {kind: count for kind, count in counts.items() if count > 1}
        if repeated:
            self.tally.wrong.append(f"prompt {prompt_id}: its socket repeated {repeated}")

    def _prompt(self, color: int) -> dict[str, Any]:
        """A prompt that, every other time, runs long enough to be reported while it runs."""
        prompt = prompt_of(color)
        prompt["2"]["inputs"]["steps"] = self.chance.choice(STEPS_OF_PROMPTS)
        return prompt

    async def _until_in_history(self, prompt_id: str) -> None:
        while not self.is_over:
            if prompt_id in (await self.ask("GET", f"/history/{prompt_id}")).json():
                self.tally.ended += 1
                return
            await asyncio.sleep(jitter(self.chance, PAUSE_SECONDS))

    async def _listen(self, prompt_id: str, counts: Counter[str]) -> None:
        """Counts the messages that a prompt has once, for the last connection."""
        url = f"{self.url.replace('http', 'ws', 1)}/ws?clientId={self.name}"
        headers = {"Authorization": f"Bearer {self.key}"}
        while True:
            with contextlib.suppress(OSError, EOFError, TimeoutError, WebSocketException):
                async with connect(
                    url, additional_headers=headers, open_timeout=SOCKET_SECONDS_MAX
                ) as socket:
                    self.tally.answers["socket opened"] += 1
                    counts.clear()  # a control plane that doesn't know the client repeats what it may have missed
                    await _count(socket, prompt_id, counts)
            await asyncio.sleep(jitter(self.chance, PAUSE_SECONDS))


async def _count(socket: ClientConnection, prompt_id: str, counts: Counter[str]) -> None:
    async for frame in socket:
        message = json.loads(frame) if isinstance(frame, str) else {}
        kind, data = message.get("type"), message.get("data") or {}
        if data.get("prompt_id") == prompt_id and kind in (
            "execution_start",
            "execution_success",
            "execution_error",
            "execution_interrupted",
        ):
            counts[kind] += 1


class UploadCustomer(Customer):
    """Uploads a picture, often after an attempt that was cut halfway, and uses it in a prompt."""

    async def act(self, key: str, color: int) -> None:
        picture = _picture(color)
        name = f"{key}.png"
        request = httpx.Request(
            "POST",
            f"{self.url}/upload/image",
            headers={"Authorization": f"Bearer {self.key}"},
            files={"image": (name, picture, "image/png")},
        )
        if self.chance.random() < CUT_CHANCE:
            await self._cut(request)
        answer = await self.ask(
            "POST", "/upload/image", files={"image": (name, picture, "image/png")}
        )
        if answer.status_code != 200:
            self.tally.wrong.append(f"POST /upload/image was refused: {answer.text[:300]}")
            raise Over
        stored = answer.json()["name"]
        self.accept("upload", stored, str(len(picture)))
        await self._use(stored, picture)

    async def _cut(self, request: httpx.Request) -> None:
        """Sends a part of the request, and cuts the connection."""
        target = urlsplit(self.url)
        lines = [f"{request.method} {request.url.raw_path.decode()} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in request.headers.items()]
        content = request.read()
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(target.hostname, target.port)
            writer.write("\r\n".join((*lines, "", "")).encode())
            writer.write(content[: self.chance.randrange(len(content))])
            await asyncio.sleep(self.chance.uniform(0.0, 1.0))
            writer.transport.abort()
            self.tally.answers["upload cut"] += 1

    async def _use(self, name: str, picture: bytes) -> None:
        query = {"filename": name, "type": "input"}
        seen = await self.ask("GET", "/view", params=query)
        if seen.content != picture:
            self.tally.wrong.append(f"upload {name}: {seen.status_code}, {len(seen.content)} bytes")
        prompt: dict[str, Any] = deepcopy(TURN)
        prompt["1"]["inputs"]["image"] = name
        prompt_id = str(UUID(int=self.chance.getrandbits(128), version=4))
        body = {"prompt": prompt, "prompt_id": prompt_id, "client_id": self.name}
        answer = await self.ask("POST", "/prompt", json=body)
        if answer.status_code != 200:
            self.tally.wrong.append(f"POST /prompt was refused: {answer.text[:300]}")
            raise Over
        job_id = uuid5(UUID(self.user_id), f"{self.tenant_id}/{prompt_id}")
        self.accept("prompt", str(job_id), prompt_id)
        while not self.is_over:
            if prompt_id in (await self.ask("GET", f"/history/{prompt_id}")).json():
                self.tally.ended += 1
                return
            await asyncio.sleep(jitter(self.chance, PAUSE_SECONDS))


def _picture(color: int) -> bytes:
    """Noise, which cannot be compressed: large enough to be cut."""
    noise = random.Random(color).randbytes(PICTURE_PIXELS * PICTURE_PIXELS * 3)
    file = io.BytesIO()
    Image.frombytes("RGB", (PICTURE_PIXELS, PICTURE_PIXELS), noise).save(file, "PNG")
    return file.getvalue()
