"""Small prompts, and the object_info of their classes."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from comfyfleet.server.catalog.draft import draft_workflow
from comfyfleet.server.catalog.model import Property, WorkflowDraft, WorkflowVersion

NOW = datetime(2026, 11, 15, 8, 30, tzinfo=UTC)
OBJECT_INFO: Mapping[str, Any] = {
    "CheckpointLoaderSimple": {
        "input": {"required": {"ckpt_name": [["sd15.safetensors", "sdxl.safetensors"]]}},
        "output": ["MODEL", "CLIP", "VAE"],
        "output_node": False,
    },
    "LoraLoader": {
        "input": {
            "required": {
                "model": ["MODEL"],
                "lora_name": [["fine.safetensors"]],
                "strength_model": ["FLOAT", {"default": 1.0, "min": -20.0, "max": 20.0}],
            }
        },
        "output": ["MODEL", "CLIP"],
        "output_node": False,
    },
    "CLIPTextEncode": {
        "input": {
            "required": {
                "text": ["STRING", {"multiline": True, "dynamicPrompts": True}],
                "clip": ["CLIP"],
            }
        },
        "output": ["CONDITIONING"],
        "output_node": False,
    },
    "LoadImage": {
        "input": {"required": {"image": [["example.png"], {"image_upload": True}]}},
        "output": ["IMAGE", "MASK"],
        "output_node": False,
    },
    "KSampler": {
        "input": {
            "required": {
                "model": ["MODEL"],
                "positive": ["CONDITIONING"],
                "latent_image": ["IMAGE"],
                "seed": ["INT", {"default": 0, "min": 0, "max": 0xFFFFFFFFFFFFFFFF}],
                "steps": ["INT", {"default": 20, "min": 1, "max": 10000}],
                "sampler_name": [["euler", "dpmpp_2m"]],
            }
        },
        "output": ["IMAGE"],
        "output_node": False,
    },
    "SaveImage": {
        "input": {
            "required": {
                "images": ["IMAGE"],
                "filename_prefix": ["STRING", {"default": "ComfyUI"}],
            }
        },
        "output": [],
        "output_node": True,
    },
}
PROMPT: dict[str, Any] = {
    "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "sdxl.safetensors"}},
    "2": {
        "class_type": "LoraLoader",
        "inputs": {"model": ["1", 0], "lora_name": "fine.safetensors", "strength_model": 1.0},
    },
    "3": {"class_type": "LoadImage", "inputs": {"image": "example.png"}},
    "4": {
        "class_type": "CLIPTextEncode",
        "inputs": {"text": "a photo of __WHAT__, {__HOW__}", "clip": ["1", 1]},
    },
    "5": {
        "class_type": "KSampler",
        "inputs": {
            "model": ["2", 0],
            "positive": ["4", 0],
            "latent_image": ["3", 0],
            "seed": 7,
            "steps": "__STEPS__",
            "sampler_name": "euler",
        },
    },
    "9": {"class_type": "SaveImage", "inputs": {"images": ["5", 0], "filename_prefix": "out"}},
}
INPUT = Property("input", "image", binding="3.image")
WHAT = Property("what", "text", placeholder="__WHAT__", default="a cat")
HOW = Property("how", "text", placeholder="{__HOW__}", default="sharp")
STEPS = Property("steps", "integer", placeholder="__STEPS__", default=20, minimum=1, maximum=50)
SEED = Property("seed", "seed", binding="5.seed")
SAMPLER = Property("sampler", "choice", binding="5.sampler_name")
STRENGTH = Property("strength", "number", binding="2.strength_model")
PROPERTIES = (INPUT, WHAT, HOW, STEPS, SEED, SAMPLER, STRENGTH)


def drafted(
    *properties: Property,
    document: Any = PROMPT,
    output_node_id: str | None = "9",
    slug: str = "photo",
    object_info: Mapping[str, Any] = OBJECT_INFO,
) -> WorkflowDraft:
    return draft_workflow(
        slug=slug,
        document=document,
        properties=properties,
        output_node_id=output_node_id,
        object_info=object_info,
    )


def versioned(drafted: WorkflowDraft) -> WorkflowVersion:
    """The workflow as it would come from the database."""
    return WorkflowVersion(
        workflow_id=1,
        version=1,
        kind=drafted.kind,
        document_key=drafted.document_key,
        document_hash=drafted.document_hash,
        properties=drafted.properties,
        output_node_id=drafted.output_node_id,
        node_types=drafted.node_types,
        models=drafted.models,
        created_at=NOW,
    )
