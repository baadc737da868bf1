"""What runs beside a control plane ends with it."""

import asyncio

from comfyfleet.server.app import _running


class FailsWhenCancelled:
    """As two relays in one group do whose connection breaks in that moment: the group then hides the cancel."""

    is_closed = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as both:
            both.create_task(self._listen())
            both.create_task(asyncio.sleep(60))

    async def _listen(self) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ConnectionError("the connection broke")

    async def close(self) -> None:
        self.is_closed = True


async def test_a_failure_in_the_moment_of_the_end_does_not_go_on_for_ever() -> None:
    works = FailsWhenCancelled()
    async with asyncio.timeout(30), _running(works):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert works.is_closed
