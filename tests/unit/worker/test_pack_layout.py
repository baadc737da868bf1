"""Where the ComfyUIs of one worker process are."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from comfyfleet.errors import InvalidInput
from comfyfleet.worker.machine import command_memory_reader
from comfyfleet.worker.managed_process import fill_command
from comfyfleet.worker.pack_plan import PackSettings, lay_out_pack
from comfyfleet.worker.settings import WorkerSettings

STATE = Path("/state of all")
BASE = WorkerSettings(
    control_url="http://plane",
    fleet_slug="gpus",
    stage="production",
    worker_id="box",
    state=STATE,
    backend_url="http://127.0.0.1:8188",
    comfyui_command="python main.py --port {port} --temp-directory {folder} --cuda-device {gpu}",
    cache_bytes=800,
)


def test_each_on_one_gpu_has_a_name_a_port_and_a_folder_of_its_own() -> None:
    (gpu,) = lay_out_pack(BASE, PackSettings(per_gpu=2))
    first, second = (slot.settings for slot in gpu.slots)
    assert [first.worker_id, second.worker_id] == ["box-1", "box-2"]
    assert [first.state, second.state] == [STATE / "1", STATE / "2"]
    assert [first.backend_url, second.backend_url] == [
        "http://127.0.0.1:8188",
        "http://127.0.0.1:8189",
    ]
    assert shlex.split(second.comfyui_command or "") == [
        *("python", "main.py", "--port", "8189"),
        *("--temp-directory", f"{STATE}/2/comfyui", "--cuda-device", "0"),
    ]
    assert [first.cache_bytes, second.cache_bytes] == [400, 400]
    # Its files are removed after delivery: it is known where they are.
    assert second.backend_folder == STATE / "2" / "comfyui"
    # The environment's own choice of a GPU stays.
    assert gpu.environ == second.comfyui_environ == {}


def test_on_several_gpus_each_is_told_its_own_by_the_order_of_the_bus() -> None:
    gpus = lay_out_pack(BASE, PackSettings(per_gpu=2, gpus=("0", "GPU-abc")))
    assert [gpu.gpu for gpu in gpus] == ["0", "GPU-abc"]
    names = [slot.settings.worker_id for gpu in gpus for slot in gpu.slots]
    assert names == ["box-gpu0-1", "box-gpu0-2", "box-gpu1-1", "box-gpu1-2"]
    ports = [(slot.settings.backend_url or "")[-4:] for gpu in gpus for slot in gpu.slots]
    assert ports == ["8188", "8189", "8190", "8191"]
    last = gpus[1].slots[1].settings
    assert last.comfyui_environ["CUDA_VISIBLE_DEVICES"] == "GPU-abc"
    assert last.comfyui_environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert shlex.split(last.comfyui_command or "")[-1] == "GPU-abc"


def test_a_single_one_keeps_the_name_and_the_state_that_it_always_had() -> None:
    (gpu,) = lay_out_pack(BASE, PackSettings())
    (slot,) = gpu.slots
    assert (slot.settings.worker_id, slot.settings.state) == ("box", STATE)
    assert slot.settings.backend_url == BASE.backend_url
    plain = dataclasses.replace(BASE, comfyui_command=None)
    ((only,),) = (each.slots for each in lay_out_pack(plain, PackSettings()))
    assert only.settings == plain


def test_several_without_a_port_each_are_refused() -> None:
    fixed = dataclasses.replace(BASE, comfyui_command="python main.py --port 8188")
    lay_out_pack(fixed, PackSettings())
    for pack in (PackSettings(per_gpu=2), PackSettings(per_gpu=None), PackSettings(1, ("0", "1"))):
        with pytest.raises(InvalidInput, match=r"doesn't contain \{port\}"):
            lay_out_pack(fixed, pack)


def test_ports_end_somewhere() -> None:
    high = dataclasses.replace(BASE, backend_url="http://127.0.0.1:65535")
    with pytest.raises(InvalidInput, match="port 65536 doesn't exist"):
        lay_out_pack(high, PackSettings(per_gpu=2))


def test_a_key_in_the_address_stays_in_it() -> None:
    keyed = dataclasses.replace(BASE, backend_url="http://me:key@127.0.0.1:9000/x")
    (gpu,) = lay_out_pack(keyed, PackSettings(per_gpu=2))
    assert gpu.slots[1].settings.backend_url == "http://me:key@127.0.0.1:9001/x"


def test_an_unknown_placeholder_is_refused_by_its_name() -> None:
    for wrong in ("{prt}", "--port={Port}", "x{port}{other}"):
        misspelt = dataclasses.replace(BASE, comfyui_command=f"python main.py {wrong}")
        name = wrong[wrong.rindex("{") :]
        with pytest.raises(InvalidInput, match=re.escape(f"unknown placeholder {name}.")):
            lay_out_pack(misspelt, PackSettings())
    with pytest.raises(
        InvalidInput, match=r"--gpu-memory-command.*placeholder \{gpus\}.* Use \{gpu\}"
    ):
        command_memory_reader("memory --of {gpus}", "0")


def test_a_command_that_can_not_be_read_is_refused() -> None:
    for command, said in (("run 'half", "isn't a valid command"), (" ", "is empty")):
        with pytest.raises(InvalidInput, match=f"--comfyui-command {said}"):
            lay_out_pack(dataclasses.replace(BASE, comfyui_command=command), PackSettings())
        with pytest.raises(InvalidInput, match=f"--gpu-memory-command {said}"):
            command_memory_reader(command, "0")


def test_other_braces_of_a_command_are_left_alone() -> None:
    command = "run '{\"a\": 1}' {folder}/x '${HOME} {a,b} { print }' {gpu}"
    words = fill_command("--x", command, {"folder": "/a {gpu}", "gpu": "1"})
    assert words == ["run", '{"a": 1}', "/a {gpu}/x", "${HOME} {a,b} { print }", "1"]
