"""What it takes to start: `import comfyfleet.workflow` and `comfyfleet --help`, against a Python that does nothing.

Each is a fresh process, the three take turns, and the median counts. What is judged is what comes on
top of Python's own start.
"""

import statistics
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table

ROUNDS = 15
BARE = ("-c", "pass")
# Seconds on top of a bare start, at most.
MEASURED = {
    "import comfyfleet.workflow": (("-c", "import comfyfleet.workflow"), 0.15),
    "comfyfleet --help": (("-m", "comfyfleet", "--help"), 0.25),
}


def main() -> None:
    commands = {"python -c pass": BARE} | {name: each for name, (each, _) in MEASURED.items()}
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, arguments in commands.items():
            times[name].append(seconds_of(arguments))
    medians = {name: statistics.median(each) for name, each in times.items()}
    table = Table("start", "ms", "on top of Python", "at most", title=f"median of {ROUNDS}")
    bare = medians["python -c pass"]
    is_good = True
    for name, median in medians.items():
        limit = MEASURED[name][1] if name in MEASURED else None
        is_good = is_good and (limit is None or median - bare <= limit)
        shown = "" if limit is None else f"{limit * 1000:.0f}"
        table.add_row(name, f"{median * 1000:.0f}", f"{(median - bare) * 1000:.0f}", shown)
    Console().print(table)
    sys.exit(not is_good)


def seconds_of(arguments: tuple[str, ...]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
