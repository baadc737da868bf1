"""An engine whose jobs need a GPU that it shares with others: `python -m tests.support.backends.gpu_engine
PORT GPU`.

`GPU` is a folder. A job takes some time of the process, then of the GPU, which one job at a time
may use; every engine uses its part of the GPU's memory as long as it lives.
"""

import fcntl
import os
import sys
import tempfile
from pathlib import Path

from tests.support.backends.nodes import GPU_FAILURES

from comfyfleet.engine import DataFolder, Engine
from comfyfleet.engine.node import Context, EngineNodeType, Interface, NodeResult, integer, node
from comfyfleet.engine.nodes import registry
from comfyfleet.engine.nodes.diagnostics import placeholder
from comfyfleet.engine.serve import listen, serve

NODE = "GpuSteps"
OWN_SECONDS, GPU_SECONDS = 0.3, 0.4


def gpu_steps(gpu: Path) -> EngineNodeType:
    @node(
        Interface(
            NODE,
            "Steps on a GPU",
            "nodes",
            "tests",
            inputs={"number": integer(0, 0, 10**9, 1)},
            outputs=("IMAGE",),
        )
    )
    def run(context: Context, number: int) -> NodeResult:
        context.pause(OWN_SECONDS)
        with (gpu / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            context.pause(GPU_SECONDS)
        return NodeResult((placeholder(),))

    return run


def memory_command(gpu: Path, *, each: int, total: int) -> str:
    """A command that prints the used and total bytes, counted by the living engines."""
    script = gpu / "memory.sh"
    script.write_text(f'echo "$(( $(ls "{gpu}" | grep -c engine$) * {each} )) {total}"\n')
    return f"sh '{script}'"


def main() -> None:
    port, gpu = int(sys.argv[1]), Path(sys.argv[2])
    here = gpu / f"{os.getpid()}.engine"
    here.touch()
    with tempfile.TemporaryDirectory() as folder, listen("127.0.0.1", port) as listener:
        nodes = {**registry(), **GPU_FAILURES, NODE: gpu_steps(gpu)}
        serve(Engine(DataFolder(Path(folder)), nodes), listener)
    here.unlink()


if __name__ == "__main__":
    main()
