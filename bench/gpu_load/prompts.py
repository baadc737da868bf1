"""The measured workflows: text to image with a checkpoint, or steps of the built-in engine."""

import random
from dataclasses import dataclass
from typing import Any, Protocol

SEED_MAX = 2**24


class Workload(Protocol):
    """Builds a prompt for a model and a seed, and names the inputs of the two."""

    @property
    def model_input(self) -> str: ...

    @property
    def seed_input(self) -> str: ...

    def prompt(self, model: str, seed: int) -> dict[str, Any]: ...


@dataclass(frozen=True)
class TextToImage:
    size: int
    steps: int
    model_input: str = "4.ckpt_name"
    seed_input: str = "3.seed"

    def prompt(self, model: str, seed: int) -> dict[str, Any]:
        sampling = {
            "seed": seed,
            "steps": self.steps,
            "cfg": 7.0,
            "sampler_name": "euler",
            "scheduler": "normal",
            "denoise": 1.0,
            "model": ["4", 0],
            "positive": ["6", 0],
            "negative": ["7", 0],
            "latent_image": ["5", 0],
        }
        size = {"width": self.size, "height": self.size, "batch_size": 1}
        return {
            "3": node("KSampler", **sampling),
            "4": node("CheckpointLoaderSimple", ckpt_name=model),
            "5": node("EmptyLatentImage", **size),
            "6": node("CLIPTextEncode", text="a lighthouse at night", clip=["4", 1]),
            "7": node("CLIPTextEncode", text="blurry", clip=["4", 1]),
            "8": node("VAEDecode", samples=["3", 0], vae=["4", 2]),
            "9": node("SaveImage", images=["8", 0], filename_prefix="bench"),
        }


@dataclass(frozen=True)
class EngineSteps:
    """Steps of the built-in engine, which has no models. An unused node contains a model's name, so
    that the queue finds one."""

    steps: int
    step_ms: int = 10
    model_input: str = "4.value"
    seed_input: str = "1.color"

    def prompt(self, model: str, seed: int) -> dict[str, Any]:
        steps = {"steps": self.steps, "step_ms": self.step_ms, "previews": False}
        empty = {"width": 8, "height": 8, "batch_size": 1, "color": seed}
        return {
            "1": node("EmptyImage", **empty),
            "2": node("ComfyfleetSteps", **steps, image=["1", 0]),
            "4": node("PrimitiveString", value=model),
            "9": node("SaveImage", images=["2", 0], filename_prefix="bench"),
        }


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def model_of(prompt: dict[str, Any], workload: Workload) -> str:
    node_id, _, name = workload.model_input.partition(".")
    return str(prompt[node_id]["inputs"][name])


def backlog(models: list[str], jobs: int, seed: int) -> list[tuple[str, int]]:
    """Returns the model and the seed of each job. The order of the models is the same in every
    scenario, and the seeds are random."""
    chance = random.Random(seed)
    names = [models[number % len(models)] for number in range(jobs)]
    chance.shuffle(names)
    fresh = random.Random()
    return [(name, fresh.randrange(SEED_MAX)) for name in names]
