"""Where a prompt runs: the least busy of some servers, Comfy Cloud, or the built-in engine."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from cyclopts import Group, Parameter, validators

from comfyfleet.cli.engine import require_engine
from comfyfleet.cli.engine_process import engine_process
from comfyfleet.cli.nodetypes import SERVER_VARIABLE, KnownTypes, types_of_server
from comfyfleet.cli.servers import base_url, shown
from comfyfleet.cli.world import World, counted
from comfyfleet.comfy import Backend, ComfyServer, Limits, ServerSettings
from comfyfleet.comfy.cloud import CloudSettings, ComfyCloud, cloud_settings
from comfyfleet.comfy.settings import RETRIES_MAX
from comfyfleet.comfy.settings import limits as limits_of
from comfyfleet.kernel.errors import FleetError, InvalidInput, InvalidValue, ServerUnavailable
from comfyfleet.workflow.media import Opened

WHERE = Group(
    "Where",
    validator=validators.mutually_exclusive,
    sort_key=1,
)
PATIENCE = Group("Patience", sort_key=7)
KEY_VARIABLE = "COMFY_CLOUD_API_KEY"
BUILT_IN = "the built-in engine"
QUEUE_SECONDS_MAX = 10.0
RUN_SECONDS_MAX = 7 * 24 * 3600.0


@Parameter(name="*")
@dataclass(frozen=True)
class TargetOptions:
    server: Annotated[
        tuple[str, ...],
        Parameter(
            group=WHERE,
            metavar="URL",
            help=f"Address of a running ComfyUI. Repeatable: the least busy takes it. By default that in ${SERVER_VARIABLE}.",
        ),
    ] = ()
    cloud: Annotated[
        bool,
        Parameter(group=WHERE, help=f"Run on Comfy Cloud, with the key in ${KEY_VARIABLE}."),
    ] = False
    timeout: Annotated[
        float | None,
        Parameter(group=PATIENCE, metavar="SECONDS", help="Longest silence: a run that shows no progress for so long is given up. By default $COMFYUI_TIMEOUT, or 300."),
    ] = None  # fmt: skip
    max_retries: Annotated[
        int | None,
        Parameter(group=PATIENCE, metavar="N", help="Attempts after a broken connection. By default $COMFYUI_MAX_RETRIES, or 3."),
    ] = None  # fmt: skip
    poll_interval: Annotated[
        float | None,
        Parameter(group=PATIENCE, metavar="SECONDS", help="How often to look at a silent server. By default $COMFYUI_POLL_INTERVAL, or 5."),
    ] = None  # fmt: skip


ANYWHERE = TargetOptions()


@dataclass(frozen=True, slots=True)
class Target:
    """`options` name it to `comfyfleet watch`; without them it is gone when this process ends."""

    name: str
    options: str | None
    connect: Callable[[], Backend]
    types: Callable[[Opened, World], KnownTypes]


@contextlib.contextmanager
def chosen_target(options: TargetOptions, world: World) -> Iterator[Target]:
    limits = limits_in(options, world)
    if options.cloud:
        yield cloud_target(limits, world)
        return
    urls = server_urls(options, world)
    if urls:
        yield server_target(least_busy(urls, limits, world), limits)
        return
    with _built_in_url(world.environ) as url:
        yield replace(server_target(url, limits), name=BUILT_IN, options=None)


def lasting_targets(options: TargetOptions, world: World) -> list[Target]:
    """Those that outlive this process, for runs that were left alone."""
    limits = limits_in(options, world)
    if options.cloud:
        return [cloud_target(limits, world)]
    targets = [server_target(url, limits) for url in server_urls(options, world)]
    if not targets:
        raise InvalidInput(
            "no server is named, and the built-in engine ends with the command that started it",
            hint=f"Add --server http://127.0.0.1:8188, or set {SERVER_VARIABLE}, or add --cloud.",
        )
    return targets


def limits_in(options: TargetOptions, world: World) -> Limits:
    limits = limits_of(world.environ)
    seconds = {"--timeout": options.timeout, "--poll-interval": options.poll_interval}
    for option, value in seconds.items():
        if value is not None and not 0 < value < float("inf"):
            raise InvalidValue(f"{option} takes a number of seconds above 0, not {value:g}")
    retries = limits.max_retries if options.max_retries is None else options.max_retries
    if not 0 <= retries <= RETRIES_MAX:
        raise InvalidValue(f"--max-retries takes a whole number, 0 to {RETRIES_MAX}, not {retries}")
    return replace(
        limits,
        job_seconds=RUN_SECONDS_MAX,
        # A run may take long as long as it shows that it goes on.
        stall_seconds=options.timeout or limits.job_seconds,
        poll_seconds=options.poll_interval or limits.poll_seconds,
        max_retries=retries,
    )


def server_urls(options: TargetOptions, world: World) -> list[str]:
    named = options.server or tuple(filter(None, [world.environ.get(SERVER_VARIABLE)]))
    return list(dict.fromkeys(map(base_url, named)))


def server_target(url: str, limits: Limits) -> Target:
    def types(opened: Opened, world: World) -> KnownTypes:
        return types_of_server(url, opened, world)

    settings = ServerSettings(url, limits)
    return Target(shown(url), f"--server {shown(url)}", lambda: ComfyServer(settings), types)


def cloud_target(limits: Limits, world: World) -> Target:
    settings = replace(cloud_settings(world.environ), limits=limits)
    if not settings.key:
        raise InvalidInput(
            f"Comfy Cloud wants a key, and {KEY_VARIABLE} is not set",
            hint="Make one at https://platform.comfy.org/profile/api-keys",
        )

    def types(opened: Opened, world: World) -> KnownTypes:
        return KnownTypes(asyncio.run(_cloud_node_types(settings)), {})

    return Target("Comfy Cloud", "--cloud", lambda: ComfyCloud(settings), types)


async def _cloud_node_types(settings: CloudSettings) -> Mapping[str, Any]:
    async with ComfyCloud(settings) as cloud:
        return (await cloud.describe()).object_info


def least_busy(urls: Sequence[str], limits: Limits, world: World) -> str:
    """Of those that answer; of equally busy ones the first."""
    if len(urls) == 1:
        return urls[0]
    impatient = replace(limits, max_retries=0, answer_seconds=QUEUE_SECONDS_MAX)
    lengths = asyncio.run(_queue_lengths(urls, impatient))
    answering: dict[str, int] = {}
    for url, length in zip(urls, lengths, strict=True):
        if isinstance(length, FleetError):
            world.warn(f"{shown(url)} is left out: {length.message}")
        else:
            answering[url] = length
    if not answering:
        raise ServerUnavailable(f"none of {len(urls)} servers answers")
    chosen = min(answering, key=answering.__getitem__)
    world.say(
        f"{shown(chosen)} is the least busy: {counted(answering[chosen], 'prompt', 'prompts')} in its queue"
    )
    return chosen


async def _queue_lengths(urls: Sequence[str], limits: Limits) -> list[int | FleetError]:
    return await asyncio.gather(*(_queue_length(url, limits) for url in urls))


async def _queue_length(url: str, limits: Limits) -> int | FleetError:
    async with ComfyServer(ServerSettings(url, limits)) as server:
        try:
            return await server.queue_length()
        except FleetError as error:
            return error


@contextlib.contextmanager
def _built_in_url(environ: Mapping[str, str]) -> Iterator[str]:
    require_engine(". Or name a ComfyUI: --server http://127.0.0.1:8188")
    with engine_process(environ) as url:
        yield url
