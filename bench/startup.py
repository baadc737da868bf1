"""Measures the startup time of `import comfyfleet.workflow` and `comfyfleet --help`, compared with
a Python process that does nothing.

Each is a new process with cached bytecode, as after an installation. The three take turns, and the
median counts. The limits apply to the time in addition to Python's own startup. If the CPU time is
much lower than the elapsed time, the machine was busy with other work.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time

from rich.console import Console
from rich.table import Table

from support import exit_status, is_quick

ROUNDS = 2 if is_quick() else 15
BARE = ("-c", "pass")
# Maximum seconds in addition to Python's own startup.
MEASURED = {
    "import comfyfleet.workflow": (("-c", "import comfyfleet.workflow"), 0.15),
    "comfyfleet --help": (("-m", "comfyfleet", "--help"), 0.25),
}


def main() -> None:
    commands = {"python -c pass": BARE} | {
        name: arguments for name, (arguments, _) in MEASURED.items()
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        for arguments in commands.values():
            spent(arguments, environ)  # the first run writes the bytecode
        for _ in range(ROUNDS):
            for name, arguments in commands.items():
                times[name].append(spent(arguments, environ))
    is_fast = show({name: median(samples) for name, samples in times.items()})
    sys.exit(exit_status(is_met=is_fast))


def spent(arguments: tuple[str, ...], environ: dict[str, str]) -> tuple[float, float]:
    """Returns the elapsed time and the CPU time, both in seconds, of a process with these
    arguments."""
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, env=environ)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    return time.perf_counter() - begin, usage.ru_utime + usage.ru_stime


def median(times: list[tuple[float, float]]) -> tuple[float, float]:
    seconds, cpu = zip(*times, strict=True)
    return statistics.median(seconds), statistics.median(cpu)


def show(medians: dict[str, tuple[float, float]]) -> bool:
    """Prints the table, and returns whether all times are within their limits."""
    columns = ("start", "ms", "CPU ms", "on top of Python", "at most")
    table = Table(*columns, title=f"median of {ROUNDS}")
    bare, _ = medians["python -c pass"]
    is_fast = True
    for name, (seconds, cpu) in medians.items():
        _, limit = MEASURED.get(name, (BARE, 0.0))
        is_fast = is_fast and seconds - bare <= limit
        figures = (seconds, cpu, seconds - bare, limit)
        table.add_row(name, *(f"{figure * 1000:.0f}" for figure in figures))
    Console().print(table)
    return is_fast


if __name__ == "__main__":
    main()
