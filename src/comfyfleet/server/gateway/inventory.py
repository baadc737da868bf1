"""Lists the GPUs and model files of the online workers in a user's fleets. Models are grouped by
ComfyUI's folder names.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic

from comfyfleet.api.worker import BackendFacts, BackendSystem, Reading
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import Fleet

# Seconds for which an inventory is cached. Some clients poll it to check whether the server is
# alive.
KEPT_SECONDS = 5.0
INVENTORIES_MAX = 1_000
DEVICES_PER_FLEET_MAX = 64

# Model folders of inputs whose folder can't be derived from the input name alone. Keys have the
# form `Class.input`.
FOLDER_OF_CLASS: Mapping[str, str] = {
    "CLIPVisionLoader.clip_name": "clip_vision",
    "UpscaleModelLoader.model_name": "upscale_models",
    "LatentUpscaleModelLoader.model_name": "latent_upscale_models",
    "ModelPatchLoader.name": "model_patches",
    "DiffusersLoader.model_path": "diffusers",
    "FrameInterpolationModelLoader.model_name": "frame_interpolation",
    "OpticalFlowLoader.model_name": "optical_flow",
}
FOLDER_OF_INPUT: Mapping[str, str] = {
    "ckpt_name": "checkpoints",
    "config_name": "configs",
    "lora_name": "loras",
    "vae_name": "vae",
    "clip_name": "text_encoders",
    "clip_name1": "text_encoders",
    "clip_name2": "text_encoders",
    "clip_name3": "text_encoders",
    "clip_name4": "text_encoders",
    "text_encoder_name": "text_encoders",
    "unet_name": "diffusion_models",
    "control_net_name": "controlnet",
    "style_model_name": "style_models",
    "gligen_name": "gligen",
    "hypernetwork_name": "hypernetworks",
    "photomaker_model_name": "photomaker",
    "audio_encoder_name": "audio_encoders",
    "bg_removal_name": "background_removal",
}


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    """A worker's GPU or CPU."""

    name: str
    is_gpu: bool
    memory_bytes: int
    memory_free_bytes: int
    ram_bytes: int
    ram_free_bytes: int
    version: str = ""
    system: BackendSystem | None = None


@dataclass(frozen=True, slots=True)
class Inventory:
    devices: Sequence[WorkerDevice] = ()
    models: Mapping[str, Sequence[str]] = field(default_factory=dict)  # folder → files


def folder_of(model_input: str) -> str | None:
    """Returns the model folder for an input such as `CheckpointLoaderSimple.ckpt_name`, or None if
    it is unknown.
    """
    return FOLDER_OF_CLASS.get(model_input) or FOLDER_OF_INPUT.get(model_input.rpartition(".")[2])


def models_by_folder(facts: Iterable[BackendFacts]) -> dict[str, list[str]]:
    """Returns the model files of all backends together, by folder."""
    models: dict[str, set[str]] = {}
    for backend in facts:
        for model_input, files in backend.model_files.items():
            if folder := folder_of(model_input):
                models.setdefault(folder, set()).update(files)
    return {folder: sorted(files) for folder, files in models.items()}


def device_of(facts: BackendFacts, reading: Reading) -> WorkerDevice:
    """Returns a worker's device. All memory counts as free if its usage is unknown."""
    ram = (facts.system.ram_total if facts.system else None) or reading.memory_total_bytes or 0
    ram_free = max(0, ram - (reading.memory_used_bytes or 0))
    memory = facts.gpu_memory_bytes or reading.gpu_memory_total_bytes or 0
    free = max(0, memory - (reading.gpu_memory_used_bytes or 0))
    is_gpu = facts.gpu is not None
    return WorkerDevice(
        facts.gpu or "cpu",
        is_gpu,
        memory if is_gpu else ram,
        free if is_gpu else ram_free,
        ram,
        ram_free,
        facts.version,
        facts.system,
    )


def largest_device(devices: Sequence[WorkerDevice]) -> list[WorkerDevice]:
    """Returns a list with the largest device, or an empty list if there are no devices. A GPU
    counts as larger than a CPU.
    """
    if not devices:
        return []
    return [max(devices, key=lambda device: (device.is_gpu, device.memory_bytes))]


async def read_inventory(plane: ControlPlane, of_fleets: Sequence[Fleet]) -> Inventory:
    seen_since = plane.clock() - timedelta(seconds=plane.settings.offline_after_seconds)
    devices: list[WorkerDevice] = []
    kinds: list[BackendFacts] = []
    async with plane.central.read() as tx:
        for fleet in of_fleets:
            workers = await fleets.workers_of(
                tx, fleet, seen_since=seen_since, limit=DEVICES_PER_FLEET_MAX
            )
            facts = await fleets.facts_of(tx, [worker for worker in workers if worker.takes_jobs])
            readings = await fleets.latest_readings(tx, list(facts))
            devices += [
                device_of(backend, stored.reading if (stored := readings.get(name)) else Reading())
                for name, backend in facts.items()
            ]
            distinct = await fleets.one_of_each_kind(tx, fleet, seen_since=seen_since)
            kinds += (await fleets.facts_of(tx, distinct)).values()
    return Inventory(devices, models_by_folder(kinds))


class InventoryCache:
    """Caches each inventory for a few seconds, for all callers."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._kept: dict[tuple[int, ...], tuple[float, Inventory]] = {}

    async def get(
        self, plane: ControlPlane, of_fleets: Sequence[Fleet], *, fresh: bool = False
    ) -> Inventory:
        """Returns the cached inventory. Reads a new one if it is too old or `fresh` is set."""
        key = tuple(sorted(fleet.id for fleet in of_fleets))
        read_at, inventory = self._kept.get(key, (float("-inf"), Inventory()))
        if not fresh and self._clock() - read_at < KEPT_SECONDS:
            return inventory
        inventory = await read_inventory(plane, of_fleets)
        if len(self._kept) >= INVENTORIES_MAX:
            self._kept.clear()
        self._kept[key] = (self._clock(), inventory)
        return inventory
