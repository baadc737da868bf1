"""A few node types without images, to test order, caching, errors and interrupts."""

from collections.abc import Callable, Mapping
from typing import Any

from comfyfleet.engine.node import Context, EngineNodeType, Folders, NodeResult
from comfyfleet.errors import NodeFailed

WORD = ["STRING", {"default": "", "multiline": False}]
NUMBER = ["INT", {"default": 1, "min": 0, "max": 10}]


def node_type(
    name: str,
    run: Callable[..., NodeResult],
    inputs: Mapping[str, Any],
    *,
    outputs: tuple[str, ...] = ("STRING",),
    optional: Mapping[str, Any] | None = None,
    output_node: bool = False,
    hidden: Mapping[str, Any] | None = None,
    shows_result: bool = False,
    **more: Any,
) -> EngineNodeType:
    groups = {"required": inputs, "optional": optional or {}, "hidden": hidden or {}}
    info = {
        "input": {group: dict(entries) for group, entries in groups.items() if entries},
        "output": list(outputs),
        "output_node": output_node,
        "has_intermediate_output": shows_result,
        "name": name,
    }
    return EngineNodeType(name=name, info={"input": {"required": {}}} | info, run=run, **more)


def say(context: Context, word: str, times: int = 1) -> NodeResult:
    return NodeResult((word * times,))


def join(context: Context, left: str, right: str) -> NodeResult:
    return NodeResult((f"{left}{right}",))


def show(context: Context, text: str, **_: Any) -> NodeResult:
    return NodeResult((text,), ui={"text": [str(text)]})


def keep(context: Context, text: str) -> NodeResult:
    """An output without anything for history."""
    return NodeResult()


def fail(context: Context, word: str) -> NodeResult:
    raise NodeFailed(f"no {word} today")


def fail_on_gpu(context: Context, message: str) -> NodeResult:
    raise RuntimeError(message)


def step(context: Context, steps: int, milliseconds: int, preview: str = "") -> NodeResult:
    picture = preview.encode("latin-1") or None
    for done in range(steps):
        context.progress(done, steps, picture)
        context.pause(milliseconds / 1000)
    return NodeResult(("stepped",))


def either(context: Context, second: bool, one: Any = None, two: Any = None) -> NodeResult:
    return NodeResult((two if second else one,))


def needed_side(inputs: Mapping[str, Any]) -> list[str]:
    side = "two" if inputs["second"] else "one"
    return [] if side in inputs else [side]


def read(context: Context, name: str) -> NodeResult:
    return NodeResult((context.folders.locate(name).read_text(),))


def check_name(folders: Folders, inputs: Mapping[str, Any]) -> str | None:
    return None if folders.holds(inputs["name"]) else f"No such file: {inputs['name']}"


def file_content(folders: Folders, inputs: Mapping[str, Any]) -> str:
    return folders.locate(inputs["name"]).read_text()


def caption(context: Context, text: str) -> NodeResult:
    context.show_text(text)
    return NodeResult((text,))


LAZY = ["STRING", {"lazy": True}]
ANY = ["*", {}]
METADATA = {"prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO"}

NODES: Mapping[str, EngineNodeType] = {
    kind.name: kind
    for kind in (
        node_type("Say", say, {"word": WORD}, optional={"times": NUMBER}),
        node_type("Join", join, {"left": ["STRING", {}], "right": ["STRING", {}]}),
        node_type(
            "Count",
            lambda context, value: NodeResult((value,)),
            {"value": NUMBER},
            outputs=("INT",),
        ),
        node_type("Show", show, {"text": ANY}, output_node=True, hidden=METADATA),
        node_type("Keep", keep, {"text": ANY}, outputs=(), output_node=True),
        node_type("Peek", show, {"text": ["STRING", {}]}, shows_result=True),
        node_type("Fail", fail, {"word": WORD}),
        node_type(
            "Step",
            step,
            {"steps": ["INT", {"min": 0, "max": 1000}], "milliseconds": ["INT", {"min": 0}]},
            optional={"preview": WORD},
        ),
        node_type(
            "Either",
            either,
            {"second": ["BOOLEAN", {}], "one": LAZY, "two": LAZY},
            needed=needed_side,
        ),
        node_type(
            "Read",
            read,
            {"name": [["a.txt"], {}]},
            validate=check_name,
            validated=("name",),
            fingerprint=file_content,
        ),
        node_type("Pick", say, {"word": ["COMBO", {"options": ["red", "green"]}]}),
        node_type("Caption", caption, {"text": ["STRING", {}]}),
    )
}


# Fails as PyTorch does.
GPU_FAILURE = "GpuFailure"
GPU_FAILURES: Mapping[str, EngineNodeType] = {
    GPU_FAILURE: node_type(
        GPU_FAILURE, fail_on_gpu, {"message": WORD}, outputs=(), output_node=True
    )
}


def link(node_id: str, slot: int = 0) -> list[Any]:
    return [node_id, slot]
