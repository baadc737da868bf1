"""Which models a backend has in memory, as far as its prompts tell."""

from comfyfleet.wire.messages import Job, ModelChange

KEPT_MAX = 8


class LoadedModels:
    """Since the last time that the backend was started or told to let go of them."""

    def __init__(self) -> None:
        self.keys: tuple[str, ...] = ()  # of leases that were taken, most recently used first
        self.set_key: str | None = None
        self._ran: tuple[str, ...] = ()  # of runs that began, the last first

    def used(self, job: Job) -> None:
        if job.model_key is not None:
            self.keys = _with_first(job.model_key, self.keys)
            self.set_key = job.model_set

    def began(self, job: Job) -> ModelChange | None:
        """How its heavy model comes to be loaded; None if it has none."""
        key, before = job.model_key, self._ran
        if key is None:
            return None
        self._ran = _with_first(key, before)
        if key in before:
            return "same" if key == before[0] else "switched"
        return "first"

    def clear(self) -> None:
        self.keys, self.set_key, self._ran = (), None, ()


def _with_first(key: str, keys: tuple[str, ...]) -> tuple[str, ...]:
    return (key, *(each for each in keys if each != key))[:KEPT_MAX]
