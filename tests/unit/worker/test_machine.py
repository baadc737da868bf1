"""The machine's state: never raised, never waited for longer than it is worth."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil
import pynvml
import pytest
from tests.support.workers.nvml import Card, CardReader

from comfyfleet.api.worker import Reading
from comfyfleet.comfy.backend import Device
from comfyfleet.errors import ServerUnavailable
from comfyfleet.worker.machine import (
    MachineMonitor,
    NvmlGpu,
    driver_memory_reader,
    first_visible_gpu,
    unknown_gpus,
    visible_gpus,
)

GB = 1024**3
FIRST = Card("NVIDIA L4", "GPU-aaaa-1", load=97, used=20 * GB, total=24 * GB, temperature=71)
SECOND = Card("NVIDIA A10G", "GPU-bbbb-2", load=3, used=1 * GB)


@pytest.mark.parametrize(
    ("variable", "chosen"),
    [
        (None, 0),
        ("1", 1),
        (" 2 ,0", 2),
        ("GPU-bbbb,GPU-aaaa", "GPU-bbbb"),
        ("MIG-1234", "MIG-1234"),
        ("", None),
        ("-1", None),
        ("NoDevFiles", None),
        ("²", None),
    ],
)
def test_the_gpu_is_the_first_that_cuda_may_see(
    variable: str | None, chosen: int | str | None
) -> None:
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert first_visible_gpu(environ) == chosen


async def test_a_gpu_is_read_with_load_memory_and_temperature(tmp_path: Path) -> None:
    reading = await MachineMonitor(tmp_path, {}, nvml=CardReader(FIRST, SECOND)).read()
    assert (reading.gpu_name, reading.gpu_load_percent) == ("NVIDIA L4", 97.0)
    assert (reading.gpu_memory_used_bytes, reading.gpu_memory_total_bytes) == (20 * GB, 24 * GB)
    assert reading.gpu_temperature_celsius == 71.0


@pytest.mark.parametrize("variable", ["1", "GPU-bbbb-2", "GPU-bb"])
async def test_of_several_gpus_the_chosen_one_is_read(tmp_path: Path, variable: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": variable}
    reading = await MachineMonitor(tmp_path, environ, nvml=CardReader(FIRST, SECOND)).read()
    assert reading.gpu_name == "NVIDIA A10G"


async def test_cpu_memory_and_disk_are_the_machines_own(tmp_path: Path) -> None:
    reading = await MachineMonitor(tmp_path, {}, nvml=None).read()
    assert reading.memory_total_bytes == psutil.virtual_memory().total
    assert 0 < (reading.memory_used_bytes or 0) < reading.memory_total_bytes
    assert 0 <= (reading.cpu_percent or 0) <= 100
    assert (reading.disk_free_bytes or 0) > 0
    assert reading.gpu_name is None


async def test_a_folder_that_is_gone_costs_only_its_figure(tmp_path: Path) -> None:
    reading = await MachineMonitor(tmp_path / "gone", {}, nvml=None).read()
    assert reading.disk_free_bytes is None
    assert reading.memory_total_bytes


async def test_the_real_library_without_a_driver_leaves_the_gpu_out(tmp_path: Path) -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        reading = await MachineMonitor(tmp_path, {}).read()
        assert reading.gpu_memory_total_bytes is None
    else:
        reading = await MachineMonitor(tmp_path, {}).read()
        assert reading.gpu_memory_total_bytes


async def test_a_figure_that_a_card_does_not_have_is_left_out(tmp_path: Path) -> None:
    card = Card("MIG", "MIG-1", used=1, broken={"load", "temperature"})
    reading = await MachineMonitor(tmp_path, {}, nvml=CardReader(card)).read()
    assert (reading.gpu_load_percent, reading.gpu_temperature_celsius) == (None, None)
    assert reading.gpu_memory_used_bytes == 1


def test_a_gpu_that_was_lost_is_opened_anew() -> None:
    card = Card("NVIDIA L4", "GPU-a", broken={"load", "memory", "name", "temperature"})
    reader = CardReader(card)
    gpu = NvmlGpu(reader, 0)
    assert gpu.read() is None
    assert reader.opened == 0
    card.broken.clear()
    figures = gpu.read()
    assert figures
    assert figures.name == "NVIDIA L4"


def test_an_index_that_does_not_exist_leaves_nothing_open() -> None:
    reader = CardReader(FIRST)
    assert NvmlGpu(reader, 7).read() is None
    assert NvmlGpu(reader, "GPU-zz").read() is None
    assert reader.opened == 0


class Backend:
    """What a ComfyUI says of its devices, and how often it was asked."""

    def __init__(self, *devices: Device, error: Exception | None = None) -> None:
        self.told = devices
        self.error = error
        self.asked = 0

    async def devices(self) -> Sequence[Device]:
        self.asked += 1
        if self.error:
            raise self.error
        return self.told


async def test_without_a_driver_the_backends_own_figures_are_told(tmp_path: Path) -> None:
    backend = Backend(Device("cpu", "cpu", 9, 9), Device("Radeon", "cuda", 16 * GB, 10 * GB))
    nvml = CardReader(has_driver=False)
    reading = await MachineMonitor(tmp_path, {}, devices=backend.devices, nvml=nvml).read()
    assert (reading.gpu_name, reading.gpu_load_percent) == ("Radeon", None)
    assert (reading.gpu_memory_used_bytes, reading.gpu_memory_total_bytes) == (6 * GB, 16 * GB)


async def test_a_cpus_memory_is_not_told_as_a_gpus(tmp_path: Path) -> None:
    backend = Backend(Device("cpu", "cpu", 64 * GB, 30 * GB))
    reading = await MachineMonitor(tmp_path, {}, devices=backend.devices, nvml=None).read()
    assert reading.gpu_memory_total_bytes is None


async def test_a_backend_that_is_down_costs_only_its_figures(tmp_path: Path) -> None:
    backend = Backend(error=ServerUnavailable("no answer"))
    reading = await MachineMonitor(tmp_path, {}, devices=backend.devices, nvml=None).read()
    assert reading.memory_total_bytes
    assert reading.gpu_name is None


async def test_neither_the_driver_nor_the_backend_is_asked_at_every_heartbeat(
    tmp_path: Path,
) -> None:
    now = 0.0
    backend, nvml = Backend(Device("gpu", "cuda", 8, 4)), CardReader(has_driver=False)
    machine = MachineMonitor(
        tmp_path, {}, devices=backend.devices, nvml=nvml, monotonic=lambda: now
    )
    for tenth in range(200):
        now = tenth / 10
        assert (await machine.read()).gpu_name == "gpu"
    assert nvml.tried == 1
    assert backend.asked == 2


async def test_a_driver_that_hangs_holds_up_neither_the_loop_nor_the_next_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comfyfleet.worker.machine.SAMPLE_SECONDS_MAX", 0.05)
    release = threading.Event()
    machine = MachineMonitor(tmp_path, {}, nvml=CardReader(Card("L4", "GPU-a", hang=release)))
    before = threading.active_count()
    async with asyncio.timeout(30):  # it hangs for good
        readings = [*await asyncio.gather(machine.read(), machine.read()), await machine.read()]
    assert readings == [Reading()] * 3
    assert threading.active_count() <= before + 1
    release.set()
    await asyncio.sleep(0.05)
    assert (await machine.read()).gpu_name == "L4"


def test_all_gpus_are_those_that_may_be_seen_else_those_that_the_driver_tells() -> None:
    cards = CardReader(Card("one", "GPU-1"), Card("two", "GPU-2"))
    assert visible_gpus({}, cards) == ("0", "1")
    assert cards.opened == 0
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-x"}, cards) == ("3", "GPU-x")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, cards) == ()
    assert visible_gpus({}, CardReader(has_driver=False)) == ()


def test_a_gpu_is_unknown_if_the_driver_tells_of_fewer() -> None:
    cards = CardReader(Card("one", "GPU-1"), Card("two", "GPU-2"))
    assert unknown_gpus(("0", "9", "1", "2", "GPU-7"), cards) == ("9", "2")
    assert cards.opened == 0
    assert unknown_gpus(("9",), CardReader(has_driver=False)) == ()


async def test_the_memory_of_a_gpu_is_what_the_driver_tells_of_that_gpu(tmp_path: Path) -> None:
    cards = CardReader(Card("one", "GPU-1"), Card("two", "GPU-2", used=5, total=80))
    read = driver_memory_reader(tmp_path, {"CUDA_VISIBLE_DEVICES": "1"}, nvml=cards)
    assert await read() == (5, 80)
    assert await driver_memory_reader(tmp_path, {}, nvml=CardReader(has_driver=False))() is None
