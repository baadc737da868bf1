"""The engine as a process that another one keeps: `python -m comfyfleet.engine.child FD FOLDER`.

It serves on a socket that it was given, wants the key that stands in its environment, and ends when
its standard input does: so it never outlives who started it, however that one ended.
"""

import logging
import os
import socket
import sys
import threading
from pathlib import Path

from comfyfleet.engine.engine import DataFolder, Engine
from comfyfleet.engine.node import limit_memory, limits_of
from comfyfleet.engine.nodes import registry
from comfyfleet.engine.serve import serve

KEY = "COMFYFLEET_ENGINE_KEY"
INPUT = 0


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="engine: %(levelname)s %(message)s")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    engine = Engine(DataFolder(Path(sys.argv[2])), registry())
    limit_memory(limits_of(os.environ))
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        serve(engine, listener, key=os.environ.pop(KEY))


def _end_with_parent() -> None:
    # The bare descriptor: Python can't shut down while a thread holds the lock of `sys.stdin`.
    while os.read(INPUT, 1024):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
