"""Tells errors of PyTorch, its GPU libraries and the operating system from errors of nodes.

A node may quote a prompt in its error, and so may a prompt quote any text. A text counts as the system's own only if
the exception's type is one that the system raises, and only from its beginning. Pure.
"""

import re

# By the last part of the name, or by the package.
_SYSTEM_TYPE = re.compile(
    r"(?:[\w.]+\.)?(?:RuntimeError|OSError|MemoryError|AcceleratorError|OutOfMemoryError"
    r"|OOM_EXCEPTION|CUDARuntimeError|CUDADriverError)"
    r"|(?:torch|triton|cupy|cupy_backends|pycuda)\.[\w.]+"
)
# What PyTorch puts before the text of a library: `CUDA error: `, `[enforce fail at alloc.cpp:7] data. `.
_HEAD = re.compile(
    r"(?:\[enforce fail at [^\]\n]{0,200}\][^\n:]{0,40}\. "
    r"|(?:CUDA|HIP|XPU|cuDNN|cuBLAS|Triton)(?: driver)?(?: error| Error \[CUDA\]): "
    r"|an? (?=illegal memory access))"
)
_HEADS_MAX = 3


def system_texts(exception_type: str | None, message: str) -> tuple[str, ...]:
    """Returns the message, and the message without what PyTorch puts before it; nothing if a node may have written
    it."""
    if not _SYSTEM_TYPE.fullmatch(exception_type or ""):
        return ()
    texts = [message]
    while len(texts) <= _HEADS_MAX and (head := _HEAD.match(texts[-1])):
        texts.append(texts[-1][head.end() :])
    return tuple(texts)
