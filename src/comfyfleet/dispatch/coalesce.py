"""Those who ask at the same moment are answered with one statement."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")
BATCH_MAX = 256


class Coalesced(Generic[Item, Answer]):
    """While one batch is on its way the next gathers, so batches grow with the load by themselves."""

    def __init__(
        self, act: Callable[[list[Item]], Awaitable[Sequence[Answer | Exception]]]
    ) -> None:
        self._act = act
        self._gathered: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._pump: asyncio.Task[None] | None = None

    def ask(self, item: Item) -> "asyncio.Future[Answer]":
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._gathered.append((item, future))
        if self._pump is None:
            self._pump = asyncio.create_task(self._run())
        return future

    async def _run(self) -> None:
        while self._gathered:
            batch = self._gathered[:BATCH_MAX]
            del self._gathered[:BATCH_MAX]
            try:
                answers = await self._act([item for item, _ in batch])
            except Exception as error:  # noqa: BLE001 — told to each who asked
                answers = [error] * len(batch)
            for (_, future), answer in zip(batch, answers, strict=True):
                _tell(future, answer)
        # Here, and not when the loop learns that this is done: whoever asks in between would wait
        # for a pump that has already looked for the last time.
        self._pump = None

    async def close(self) -> None:
        if self._pump is not None:
            await asyncio.wait([self._pump])


def _tell(future: "asyncio.Future[Answer]", answer: Answer | Exception) -> None:
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
