"""Small node classes and workflows for the tests of single passes."""

from typing import Any


def node_class(
    required: dict[str, Any], *outputs: str, optional: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """An entry of object_info."""
    optional = optional or {}
    return {
        "input": {"required": required, "optional": optional},
        "input_order": {"required": list(required), "optional": list(optional)},
        "output": list(outputs),
        **more,
    }


CLASSES: dict[str, Any] = {
    "Source": node_class({"size": ["INT", {"default": 64, "min": 8, "max": 512, "step": 8}]}, "IMAGE"),
    "MaskSource": node_class({}, "MASK"),
    "Invert": node_class({"image": ["IMAGE"]}, "IMAGE"),
    "Blend": node_class(
        {"mask": ["MASK"], "image": ["IMAGE"], "amount": ["FLOAT", {"default": 0.5, "step": 0.1}]},
        "IMAGE",
    ),
    "Sampler": node_class(
        {
            "image": ["IMAGE"],
            "seed": ["INT", {"default": 0, "control_after_generate": True}],
            "steps": ["INT", {"default": 20, "min": 1, "max": 100}],
            "method": [["euler", "ddim"]],
            "text": ["STRING", {"multiline": True, "dynamicPrompts": True}],
        },
        "IMAGE",
    ),
    "Resize": node_class(
        {
            "image": ["IMAGE"],
            "mode": [
                "COMFY_DYNAMICCOMBO_V3",
                {
                    "options": [
                        {"key": "by", "inputs": {"required": {"factor": ["FLOAT", {"default": 2.0}]}}},
                        {
                            "key": "to",
                            "inputs": {
                                "required": {"width": ["INT", {}], "height": ["INT", {}]},
                                "optional": {"like": ["IMAGE"]},
                            },
                        },
                    ]
                },
            ],
            "smooth": ["BOOLEAN", {"default": True}],
        },
        "IMAGE",
    ),
    "Stack": node_class(
        {
            "images": [
                "COMFY_AUTOGROW_V3",
                {"template": {"input": {"required": {"image": ["IMAGE"]}}, "prefix": "image", "min": 1, "max": 4}},
            ]
        },
        "IMAGE",
    ),
    "SaveImage": node_class(
        {"images": ["IMAGE"], "filename_prefix": ["STRING", {"default": "out"}]},
        output_node=True,
    ),
}  # fmt: skip


def node(node_id: int, kind: str, *links: tuple[str, int | None], **more: Any) -> dict[str, Any]:
    """A saved node; `links` are the inputs that are saved with it, with their link ids."""
    inputs = [{"name": name, "type": "*", "link": link} for name, link in links]
    return {"id": node_id, "type": kind, "mode": 0, "inputs": inputs, **more}


def workflow(
    nodes: list[dict[str, Any]], links: list[Any] | None = None, **more: Any
) -> dict[str, Any]:
    return {"version": 0.4, "nodes": nodes, "links": links or [], "last_node_id": 0, **more}


def subgraph(
    key: str,
    nodes: list[dict[str, Any]],
    links: list[list[Any]],
    inputs: list[tuple[str, str, list[int]]],
    outputs: list[tuple[str, str, list[int]]],
) -> dict[str, Any]:
    """A definition; links as lists of id, origin, slot, target, slot."""
    fields = ("id", "origin_id", "origin_slot", "target_id", "target_slot")
    return {
        "id": key,
        "name": key.title(),
        "nodes": nodes,
        "links": [dict(zip(fields, link, strict=True)) | {"type": "*"} for link in links],
        "inputs": [{"name": n, "type": t, "linkIds": ids} for n, t, ids in inputs],
        "outputs": [{"name": n, "type": t, "linkIds": ids} for n, t, ids in outputs],
    }
