"""Where the ComfyUIs of one worker process are: GPUs, ports, folders, names. Pure."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from comfyfleet.agent.command_words import filled_words
from comfyfleet.agent.naming import WORKER_ID_CHARACTERS_MAX
from comfyfleet.agent.pack_size import MOST
from comfyfleet.agent.settings import WorkerSettings
from comfyfleet.kernel.errors import InvalidInput

OPTION = "--comfyui-command"
PORT_MAX = 65535
FOLDERS = ("input", "output", "temp", "user")
# Of a worker's own folder inside the state folder of all.
SLOT_NAME = re.compile(r"(gpu\d+-)?\d+")
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class PackSettings:
    """`per_gpu`: ComfyUIs on each GPU; None: as many as pay. `gpus`: by index or UUID, as CUDA names
    them; none: the one that the environment names. `memory_command` prints a GPU's used and total bytes.
    """

    per_gpu: int | None = 1
    gpus: tuple[str, ...] = ()
    memory_command: str | None = None

    @property
    def is_auto(self) -> bool:
        return self.per_gpu is None

    @property
    def most(self) -> int:
        return MOST if self.per_gpu is None else self.per_gpu

    @property
    def is_one(self) -> bool:
        return self.per_gpu == 1 and len(self.gpus) <= 1


@dataclass(frozen=True)
class Slot:
    """A place for one ComfyUI and its worker. `folder`: where that ComfyUI keeps its files, if it is
    told so."""

    number: int  # on its GPU, from 1
    settings: WorkerSettings
    folder: Path | None = None


@dataclass(frozen=True)
class GpuSlots:
    """All places on one GPU. `environ`: how its programs are told which one it is."""

    gpu: str
    environ: Mapping[str, str]
    slots: tuple[Slot, ...]


def layout(base: WorkerSettings, pack: PackSettings, default_gpu: str = "0") -> list[GpuSlots]:
    """`base`: its backend is the first one's; those after it have the ports after that one."""
    if base.comfyui_command is None:
        return [GpuSlots(default_gpu, {}, (Slot(1, base),))]
    _check_command(base.comfyui_command, pack)
    gpus = pack.gpus or (default_gpu,)
    return [
        GpuSlots(
            gpu,
            _gpu_environ(gpu) if pack.gpus else {},
            tuple(_slot(base, pack, gpus, place, number) for number in range(1, pack.most + 1)),
        )
        for place, gpu in enumerate(gpus)
    ]


def _slot(
    base: WorkerSettings, pack: PackSettings, gpus: tuple[str, ...], place: int, number: int
) -> Slot:
    name = "" if pack.is_one else f"{number}" if not pack.gpus else f"gpu{place}-{number}"
    state = base.state / name if name else base.state
    url, port = _moved(base.backend_url or "", place * pack.most + number - 1)
    folder = state / "comfyui"
    values = {"port": str(port), "gpu": gpus[place], "folder": str(folder)}
    command = base.comfyui_command or ""
    own = folder if "{folder}" in command else None
    settings = replace(
        base,
        worker_id=_named(base.worker_id, name),
        state=state,
        backend_url=url,
        comfyui_command=shlex.join(filled_words(OPTION, command, values)),
        comfyui_environ=_gpu_environ(gpus[place]) if pack.gpus else {},
        backend_folder=base.backend_folder or own,
        cache_bytes=base.cache_bytes // (pack.most * len(gpus)),
    )
    return Slot(number, settings, own)


def _named(worker_id: str, name: str) -> str:
    return f"{worker_id[: WORKER_ID_CHARACTERS_MAX - len(name) - 1]}-{name}" if name else worker_id


def _moved(url: str, further: int) -> tuple[str, int]:
    parts = urlsplit(url)
    first = parts.port or (443 if parts.scheme == "https" else 80)
    port = first + further
    if port > PORT_MAX:
        raise InvalidInput(f"there is no port {port}: give the first one with a lower --backend")
    if not further:
        return url, port
    place = parts.netloc.removesuffix(f":{parts.port}")
    return parts._replace(netloc=f"{place}:{port}").geturl(), port


def _gpu_environ(gpu: str) -> dict[str, str]:
    # By bus, as NVML counts them; CUDA's own order is by speed.
    return {**dict.fromkeys(GPU_VARIABLES, gpu), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _check_command(command: str, pack: PackSettings) -> None:
    if not pack.is_one and "{port}" not in command:
        raise InvalidInput(
            "several ComfyUIs need a port each, and --comfyui-command has no {port}",
            hint='Write it as "python main.py --port {port} --temp-directory {folder}".',
        )


def make_folders(slot: Slot) -> None:
    """A ComfyUI wants some of them to be there when it starts."""
    if slot.folder is not None:
        for name in FOLDERS:
            (slot.folder / name).mkdir(parents=True, exist_ok=True)
