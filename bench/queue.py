"""Measures the speed of the queue, compared with pgqueuer and procrastinate in the same run.

    make bench        or        python bench/queue.py [--quick] [--rounds N] [--check]

The measurements are described in bench/queue_load/.
"""

import sys

PEERS = ("pgqueuer", "procrastinate")

if __name__ == "queue":
    # When a benchmark runs from this folder, `import queue` finds this file instead of the standard
    # library's module, so this file loads that one in its place.
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    from pathlib import Path

    here = Path(__file__).resolve().parent
    elsewhere = [path for path in sys.path if Path(path).resolve() != here]
    spec = PathFinder.find_spec("queue", elsewhere)
    assert spec
    assert spec.loader
    sys.modules["queue"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["queue"])

if __name__ == "__main__":
    try:
        if "--quick" not in sys.argv:
            import queue_load.peers  # noqa: F401  (before anything is started)
        from queue_load.main import main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in PEERS:
            raise
        raise SystemExit(
            f"{error.name} is not installed. The queue is measured against others, which an extra has: "
            "pip install -e '.[bench]'"
        ) from None

    sys.exit(main())
