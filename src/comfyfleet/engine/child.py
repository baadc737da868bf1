"""The engine as a child process: `python -m comfyfleet.engine.child FD|HOST:PORT FOLDER`.

It serves on the inherited socket FD, or listens on HOST:PORT where sockets can't be inherited. It
requires the key from its environment. It exits when its standard input closes, so that it never
outlives its parent, however the parent ended.
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
from comfyfleet.engine.serve import listen, serve

KEY = "COMFYFLEET_ENGINE_KEY"
INPUT = 0


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="engine: %(levelname)s %(message)s")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    engine = Engine(DataFolder(Path(sys.argv[2])), registry())
    limit_memory(limits_of(os.environ))
    with _listener(sys.argv[1]) as listener:
        serve(engine, listener, key=os.environ.pop(KEY))


def _listener(where: str) -> socket.socket:
    host, colon, port = where.rpartition(":")
    return listen(host, int(port)) if colon else socket.socket(fileno=int(where))


def _end_with_parent() -> None:
    # Reads the bare descriptor, because Python can't shut down while a thread holds the lock of
    # `sys.stdin`.
    while os.read(INPUT, 1024):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
