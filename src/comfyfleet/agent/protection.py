"""Scale-in protection: an auto-scaling group takes away idle machines, not the busy ones.

Workers that share a machine agree through files in `shared`: the last one to fall idle lets it go.
"""

import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from comfyfleet.agent.metadata import Metadata, NoMetadata
from comfyfleet.agent.neighbours import Neighbours
from comfyfleet.kernel.extras import install_line

logger = logging.getLogger(__name__)

# Between two jobs a worker is idle for a moment; AWS need not hear of that.
IDLE_SECONDS = 30.0
RETRY_SECONDS_MIN, RETRY_SECONDS_MAX = 5.0, 300.0
CLOSE_SECONDS_MAX = 5.0
CONNECT_SECONDS_MAX, ANSWER_SECONDS_MAX = 3, 10


class AwsFailed(Exception):
    """A call to AWS failed; it will be made again."""


@dataclass(frozen=True, slots=True)
class Member:
    """This instance in its group. `client` is boto3's for autoscaling."""

    client: Any
    instance_id: str
    group: str

    async def protect(self, protected: bool) -> None:
        await _called(
            self.client.set_instance_protection,
            InstanceIds=[self.instance_id],
            AutoScalingGroupName=self.group,
            ProtectedFromScaleIn=protected,
        )


async def find_member(metadata: Metadata, environ: Mapping[str, str]) -> Member | None:
    """None: not on EC2, without boto3, or in no auto-scaling group. Raises AwsFailed."""
    try:
        instance_id = await metadata.get("instance-id")
        if not instance_id:
            return None
        region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
        region = region or await metadata.get("placement/region")
    except NoMetadata:
        return None
    client = await _open_client(region)
    if client is None:
        return None
    answer = await _called(client.describe_auto_scaling_instances, InstanceIds=[instance_id])
    for found in answer["AutoScalingInstances"]:
        logger.info(
            "scale-in protection in the auto-scaling group %s", found["AutoScalingGroupName"]
        )
        return Member(client, instance_id, found["AutoScalingGroupName"])
    logger.info("%s is in no auto-scaling group: no scale-in protection", instance_id)
    return None


async def _open_client(region: str | None) -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ModuleNotFoundError:
        logger.info("no scale-in protection: %s", install_line("aws"))
        return None
    config = Config(
        connect_timeout=CONNECT_SECONDS_MAX,
        read_timeout=ANSWER_SECONDS_MAX,
        retries={"total_max_attempts": 1},  # we retry ourselves, with what is wanted by then
    )
    return await _called(boto3.client, "autoscaling", region_name=region, config=config)


async def _called(call: Callable[..., Any], *arguments: object, **named: object) -> Any:
    """In a thread, because boto3 blocks."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return await asyncio.to_thread(call, *arguments, **named)
    except (BotoCoreError, ClientError) as error:
        raise AwsFailed(str(error)) from error


class Protection:
    """Say `busy` or `idle` at any time; `run` brings AWS in line, sooner or later."""

    def __init__(
        self,
        metadata: Metadata,
        environ: Mapping[str, str],
        *,
        idle_seconds: float = IDLE_SECONDS,
        retry_seconds: float = RETRY_SECONDS_MIN,
        shared: Path | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find = partial(find_member, metadata, environ)
        self._shared = shared or Path(tempfile.gettempdir())
        self._idle_seconds = idle_seconds
        self._retry_seconds = retry_seconds
        self._monotonic = monotonic
        self._member: Member | None = None
        self._neighbours: Neighbours | None = None
        self._is_busy = False
        self._idle_since = monotonic()
        self._said: bool | None = None  # what AWS knows; None: nobody knows
        self._changed = asyncio.Event()

    def busy(self) -> None:
        if not self._is_busy:
            self._is_busy = True
            self._changed.set()

    def idle(self) -> None:
        if self._is_busy:
            self._is_busy = False
            self._idle_since = self._monotonic()
            self._changed.set()

    async def run(self) -> None:
        """Ends where there is nothing to protect; else goes on until it is cancelled."""
        retries = _growing(self._retry_seconds)
        while True:
            try:
                if self._member is None and not await self._is_found():
                    return
                await self._follow()
            except (AwsFailed, OSError) as error:
                logger.warning("scale-in protection can't be set now: %s", error)
                await asyncio.sleep(next(retries))
            else:
                retries = _growing(self._retry_seconds)

    async def close(self) -> None:
        """A worker that leaves no longer needs its machine. Call it when `run` has been stopped."""
        self._is_busy = False
        try:
            async with asyncio.timeout(CLOSE_SECONDS_MAX):
                await self._say(protected=False)
        except (AwsFailed, OSError) as error:  # a timeout is an OSError, too
            logger.warning("scale-in protection could not be switched off: %s", error)

    async def _is_found(self) -> bool:
        self._member = await self._find()
        if self._member is None:
            return False
        self._neighbours = Neighbours(self._shared / f"comfyfleet-{self._member.instance_id}")
        return True

    async def _follow(self) -> None:
        """One step: wait for a change, or for its time, or tell AWS."""
        self._changed.clear()
        wait_seconds = self._seconds_until_due()
        if wait_seconds == 0:
            await self._say(protected=self._is_busy)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_seconds):
                await self._changed.wait()

    def _seconds_until_due(self) -> float | None:
        """None: AWS knows all there is to know."""
        if self._said is self._is_busy:
            return None
        if self._is_busy:
            return 0
        return max(0.0, self._idle_since + self._idle_seconds - self._monotonic())

    async def _say(self, *, protected: bool) -> None:
        if self._member is None or self._neighbours is None or self._said is protected:
            return
        self._said = None
        if protected:
            self._neighbours.mark_busy()
        async with self._neighbours.turn():
            if protected or not self._neighbours.others_are_busy():
                await self._member.protect(protected)
            if not protected:
                self._neighbours.unmark()
        self._said = protected


def _growing(seconds: float) -> Iterator[float]:
    while True:
        yield seconds
        seconds = min(2 * seconds, RETRY_SECONDS_MAX)
