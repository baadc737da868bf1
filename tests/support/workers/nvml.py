"""A fake NVML with the pynvml functions that we use. Tests define its GPUs."""

# The names are NVIDIA's.
# ruff: noqa: N802

import threading
from dataclasses import dataclass, field


@dataclass
class Card:
    name: str
    uuid: str
    load: int = 0
    used: int = 0
    total: int = 24 * 1024**3
    temperature: int = 40
    broken: set[str] = field(default_factory=set)
    hang: threading.Event | None = None


@dataclass(frozen=True)
class Rates:
    gpu: int


@dataclass(frozen=True)
class Memory:
    used: int
    total: int


class CardReader:
    """Reads cards as strictly as the driver. Calls fail before init, and invalid values raise an
    error."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self, *cards: Card, has_driver: bool = True) -> None:
        self.cards = cards
        self.has_driver = has_driver
        self.opened = 0
        self.tried = 0

    def nvmlInit(self) -> None:
        self.tried += 1
        if not self.has_driver:
            raise self.NVMLError("Driver Not Loaded")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        if not self.opened:
            raise self.NVMLError("Uninitialized")
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        if not self.opened or index >= len(self.cards):
            raise self.NVMLError("Invalid Argument")
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:
        for card in self.cards:
            if card.uuid == uuid:
                return card
        raise self.NVMLError("Not Found")

    def nvmlDeviceGetUUID(self, card: Card) -> str:
        return card.uuid

    def nvmlDeviceGetName(self, card: Card) -> str:
        self._check(card, "name")
        return card.name

    def nvmlDeviceGetUtilizationRates(self, card: Card) -> Rates:
        self._check(card, "load")
        return Rates(card.load)

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> Memory:
        self._check(card, "memory")
        return Memory(card.used, card.total)

    def nvmlDeviceGetTemperature(self, card: Card, sensor: int) -> int:
        self._check(card, "temperature")
        assert sensor == self.NVML_TEMPERATURE_GPU
        return card.temperature

    def _check(self, card: Card, figure: str) -> None:
        if card.hang:
            card.hang.wait()
        if not self.opened:
            raise self.NVMLError("Uninitialized")
        if figure in card.broken:
            raise self.NVMLError("Not Supported")
