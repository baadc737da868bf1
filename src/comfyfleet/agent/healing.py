"""What an error says about the backend, and what helps. Pure, by tables."""

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from comfyfleet.wire.messages import RequeueReason

TEXT_CHARACTERS_MAX = 20_000


class Ill(StrEnum):
    """What is wrong with a worker's place of work, and what ends that."""

    DOWN = "down"  # doesn't answer; until it does
    HUNG = "hung"  # answers, and its prompt thread is stuck; until it was restarted, or idle
    POISONED = "poisoned"  # every later prompt fails too; until it was restarted
    CLOSED = "closed"  # an account without access or credits; looked at again after a while
    DISK_FULL = "disk_full"  # until there is room


class Fault(NamedTuple):
    """`frees`: letting go of models and kept results helps. `relists`: its lists have changed."""

    reason: RequeueReason
    ill: Ill | None = None
    frees: bool = False
    relists: bool = False


OUT_OF_MEMORY = Fault("out_of_memory", frees=True)
POISONED = Fault("backend_fault", Ill.POISONED)

# The first that fits. Types are matched at the end of the name, texts anywhere.
_BY_TYPE: tuple[tuple[str, Fault], ...] = (
    ("OutOfMemoryError", OUT_OF_MEMORY),
    ("OOM_EXCEPTION", OUT_OF_MEMORY),
    ("MemoryError", OUT_OF_MEMORY),
    ("AcceleratorError", POISONED),
)
_BY_TEXT: tuple[tuple[str, Fault], ...] = (
    (r"CUDA (error: )?out of memory", OUT_OF_MEMORY),
    (r"(HIP|MPS backend|XPU) out of memory", OUT_OF_MEMORY),
    (r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED", OUT_OF_MEMORY),
    (r"Allocation on device\b", OUT_OF_MEMORY),
    (r"DefaultCPUAllocator: (can't allocate|not enough) memory", OUT_OF_MEMORY),
    (r"Cannot allocate memory", OUT_OF_MEMORY),
    (r"CUDA error: |HIP error: |CUDA driver error: ", POISONED),
    (r"cudaError[A-Z]\w+|CUDA_ERROR_[A-Z_]+", POISONED),
    (r"device-side assert|illegal memory access|unspecified launch failure", POISONED),
    (r"CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED|ARCH_MISMATCH)", POISONED),
    (r"CUDNN_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED)", POISONED),
    (r"no CUDA-capable device|Found no NVIDIA driver|GPU is lost|fallen off the bus", POISONED),
)
_TEXTS = tuple((re.compile(pattern, re.IGNORECASE), fault) for pattern, fault in _BY_TEXT)


def fault_in(
    exception_type: str | None, message: str, traceback: Sequence[str] = ()
) -> Fault | None:
    """None: the prompt's own fault. The traceback's last line only: it quotes code above that."""
    for ending, fault in _BY_TYPE:
        if (exception_type or "").endswith(ending):
            return fault
    text = "\n".join([message, *traceback[-1:]])[:TEXT_CHARACTERS_MAX]
    for pattern, fault in _TEXTS:
        if pattern.search(text):
            return fault
    return None
