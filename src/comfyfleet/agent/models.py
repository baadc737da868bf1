"""Which models a backend has in memory, as far as its prompts tell."""

from comfyfleet.wire.messages import Job

KEPT_MAX = 8


class LoadedModels:
    """Since the last time that the backend was started or told to let go of them."""

    def __init__(self) -> None:
        self.keys: tuple[str, ...] = ()  # most recently used first
        self.set_key: str | None = None

    def used(self, job: Job) -> None:
        if job.model_key is not None:
            others = (key for key in self.keys if key != job.model_key)
            self.keys = (job.model_key, *others)[:KEPT_MAX]
            self.set_key = job.model_set

    def clear(self) -> None:
        self.keys, self.set_key = (), None
