"""The fallback for machines whose driver says nothing: the backend's own figures."""

from pathlib import Path

from comfyfleet.comfy import ComfyServer, ServerSettings
from comfyfleet.engine import serve_in_thread
from comfyfleet.worker.machine import MachineMonitor


async def test_devices_are_told_without_the_node_types() -> None:
    with serve_in_thread() as served:
        async with ComfyServer(ServerSettings(served.url)) as server:
            devices, description = await server.devices(), await server.describe()
    assert [(each.name, each.kind, each.memory_bytes) for each in devices] == [
        (each.name, each.kind, each.memory_bytes) for each in description.devices
    ]
    assert devices


async def test_a_backend_on_a_cpu_adds_no_gpu_figures(tmp_path: Path) -> None:
    with serve_in_thread() as served:
        async with ComfyServer(ServerSettings(served.url)) as server:
            reading = await MachineMonitor(tmp_path, {}, devices=server.devices, nvml=None).read()
    assert reading.gpu_name is None
    assert reading.memory_total_bytes
