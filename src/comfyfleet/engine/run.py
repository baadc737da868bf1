"""A single run of a prompt: the order of its nodes, results that are reused from the cache, the
inputs of each node, and the messages to clients.

Nodes may be added while others run (lazy inputs). So the schedule is not a list, but a graph from
which nodes are removed. The order is the same as ComfyUI's, because clients see it: outputs run as
soon as possible, followed by the nodes that lead to the next outputs.

Results are cached by signature, which covers the content of a node and of all nodes before it. An
unchanged part of a prompt therefore runs only once.
"""

import hashlib
import itertools
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from datetime import datetime
from random import Random
from typing import Any

from comfyfleet.engine.node import Context, EngineNodeType, Folders, NodeResult
from comfyfleet.errors import Interrupted, NodeFailed
from comfyfleet.protocol import sockets
from comfyfleet.protocol.payloads import RunOutcome
from comfyfleet.protocol.sockets import Audience
from comfyfleet.protocol.validation import (
    DeclaredInput,
    Prompt,
    declared_inputs,
    is_link,
    traceback_lines,
    type_name,
)


class PromptProgress:
    """The states of the nodes that have started, in starting order."""

    def __init__(self, prompt_id: str) -> None:
        self._prompt_id = prompt_id
        self._nodes: dict[str, dict[str, Any]] = {}

    def start(self, node_id: str) -> None:
        self._set(node_id, value=0.0, most=1.0, state="running")

    def update(self, node_id: str, done: float, total: float) -> None:
        self._set(node_id, value=done, most=total, state="running")

    def finish(self, node_id: str) -> None:
        # A cached node was never started, so its progress is reported as 1 of 1.
        most = self._nodes[node_id]["max"] if node_id in self._nodes else 1
        self._set(node_id, value=most, most=most, state="finished")

    def state(self) -> dict[str, Any]:
        return {"prompt_id": self._prompt_id, "nodes": self._nodes}

    def _set(self, node_id: str, *, value: float, most: float, state: str) -> None:
        self._nodes[node_id] = {
            "value": value,
            "max": most,
            "state": state,
            "node_id": node_id,
            "prompt_id": self._prompt_id,
            "display_node_id": node_id,
            "parent_node_id": None,
            "real_node_id": node_id,
        }


@dataclass(frozen=True, slots=True)
class RunContext:
    """The state that all nodes of a run share."""

    folders: Folders
    prompt: Prompt
    prompt_id: str
    client_id: Any
    extra_pnginfo: Mapping[str, Any] | None
    audience: Audience
    progress: PromptProgress
    interrupted: threading.Event

    def stop_if_interrupted(self) -> None:
        if self.interrupted.is_set():
            raise Interrupted("the run was interrupted")

    def send_progress(self) -> None:
        self.audience.send("progress_state", self.progress.state(), self.client_id)


@dataclass(frozen=True, slots=True)
class NodeContext:
    """The Context of a single node."""

    context: RunContext
    node_id: str
    random: Random
    memory: MutableMapping[str, Any]
    started_at: datetime

    @property
    def folders(self) -> Folders:
        return self.context.folders

    @property
    def prompt(self) -> Prompt:
        return self.context.prompt

    @property
    def extra_pnginfo(self) -> Mapping[str, Any] | None:
        return self.context.extra_pnginfo

    def now(self) -> datetime:
        return self.started_at

    def progress(self, done: float, total: float, preview: bytes | None = None) -> None:
        self.context.stop_if_interrupted()
        self.context.progress.update(self.node_id, done, total)
        self.context.send_progress()
        # Like ComfyUI, send a preview with metadata before the progress, and one without metadata
        # after it.
        wants_metadata = self.context.audience.wants_metadata(self.context.client_id)
        if preview and wants_metadata:
            self._send(sockets.image_with_metadata_frame(preview, self._metadata()))
        self._send_step(done, total)
        if preview and not wants_metadata:
            self._send(sockets.image_frame(preview))

    def show_text(self, text: str) -> None:
        # Like in ComfyUI, the text is sent to all clients.
        self.context.audience.send_frame(sockets.text_frame(self.node_id, text))

    def pause(self, seconds: float) -> None:
        self.context.interrupted.wait(seconds)
        self.context.stop_if_interrupted()

    def _send_step(self, done: float, total: float) -> None:
        step = {"value": done, "max": total, "prompt_id": self.context.prompt_id}
        self.context.audience.send(
            "progress", {**step, "node": self.node_id}, self.context.client_id
        )

    def _send(self, frame: bytes) -> None:
        self.context.audience.send_frame(frame, self.context.client_id)

    def _metadata(self) -> dict[str, Any]:
        return {
            "node_id": self.node_id,
            "prompt_id": self.context.prompt_id,
            "display_node_id": self.node_id,
            "parent_node_id": None,
            "real_node_id": self.node_id,
        }


Message = tuple[str, Mapping[str, Any]]


class RunMessages:
    """Sends the messages of a run. Without a client, most of them only go to the history."""

    def __init__(
        self,
        context: RunContext,
        clock: Callable[[], float],
        announce: Callable[[Any, str], None],
    ) -> None:
        self.messages: list[Message] = []
        self._context = context
        self._clock = clock
        self._announce = announce

    def send(self, event: str, *, to_all: bool = False, **data: Any) -> None:
        """Sends a message to the client and records it in the history. With `to_all`, it is sent to
        all clients if the prompt has no client."""
        now_ms = int(self._clock() * 1000)
        timed = {**data, "prompt_id": self._context.prompt_id, "timestamp": now_ms}
        self.messages.append((event, timed))
        if self._context.client_id is not None or to_all:
            self._context.audience.send(event, timed, self._context.client_id)

    def executing(self, node_id: str) -> None:
        if self._context.client_id is not None:
            self._announce(self._context.client_id, node_id)
            self._send("executing", node_id)

    def executed(self, node_id: str, output: Mapping[str, Any] | None) -> None:
        if self._context.client_id is not None:
            self._send("executed", node_id, output=output)

    def _send(self, event: str, node_id: str, **more: Any) -> None:
        data = {"node": node_id, "display_node": node_id, **more}
        data["prompt_id"] = self._context.prompt_id
        self._context.audience.send(event, data, self._context.client_id)


# The names of ComfyUI's functions that differ from `<node type>.execute`. They occur in errors.
NAMES: Mapping[str, str] = {
    "EmptyImage": "EmptyImage.generate",
    "ImageBatch": "ImageBatch.batch",
    "ImageInvert": "ImageInvert.invert",
    "ImagePadForOutpaint": "ImagePadForOutpaint.expand_image",
    "ImageScale": "ImageScale.upscale",
    "ImageScaleBy": "ImageScaleBy.upscale",
    "LoadImage": "LoadImage.load_image",
    "LoadImageMask": "LoadImageMask.load_image",
    "PreviewAny": "PreviewAny.main",
    "PreviewImage": "SaveImage.save_images",
    "SaveImage": "SaveImage.save_images",
    "SaveImageWebsocket": "SaveImageWebsocket.save_images",
    "ComfyMathExpression": "MathExpressionNode.execute",
    "ComfySwitchNode": "SwitchNode.execute",
    "ImageBlend": "Blend.execute",
    "ImageBlur": "Blur.execute",
    "ImageQuantize": "Quantize.execute",
    "ImageSharpen": "Sharpen.execute",
    "PrimitiveBoolean": "Boolean.execute",
    "PrimitiveFloat": "Float.execute",
    "PrimitiveInt": "Int.execute",
    "PrimitiveString": "String.execute",
    "PrimitiveStringMultiline": "StringMultiline.execute",
    "Video Slice": "VideoSlice.execute",
}


def python_name(node_type: EngineNodeType) -> str:
    return NAMES.get(node_type.name, f"{node_type.name}.execute")


# Ready nodes within this many steps of an output run before other ready nodes.
STEPS_BEFORE_OUTPUT_MAX = 2

NodeTest = Callable[[str], bool]


class MissingNode(NodeFailed):
    """Raised when an input that isn't validated is linked to a node that is not in the prompt."""

    def __init__(self, node_id: str, missing: str) -> None:
        super().__init__(f"Node {missing} not found", exception_type="graph.NodeNotFoundError")
        self.node_id = node_id


class DependencyCycle(NodeFailed):
    def __init__(self, node_id: str) -> None:
        super().__init__("Dependency cycle detected", exception_type="graph.DependencyCycleError")
        self.node_id = node_id


class Schedule:
    """The nodes that haven't run yet, and their dependencies."""

    def __init__(
        self,
        prompt: Prompt,
        *,
        is_cached: NodeTest,
        is_output: NodeTest,
        is_lazy: Callable[[str, str], bool],
    ) -> None:
        self._prompt = prompt
        self._is_cached = is_cached
        self._is_output = is_output
        self._is_lazy = is_lazy
        self._waiters: dict[str, dict[str, None]] = {}
        self._blockers: dict[str, int] = {}
        self._linked: dict[str, set[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._blockers)

    def add(self, node_id: str) -> None:
        """Adds a node and all nodes that it needs, except for cached and lazy ones."""
        stack, links = [node_id], []
        while stack:
            current = stack.pop()
            if current in self._blockers:
                continue
            self._blockers[current] = 0
            self._waiters[current] = {}
            for source in self._eager_sources(current):
                if not self._is_cached(source):
                    stack.append(source)
                links.append((source, current))
        for source, target in links:
            self._connect(source, target)

    def require(self, node_id: str, input_name: str) -> None:
        """Marks a lazy input as required, so that the node that it is linked to will run."""
        link = self._prompt[node_id]["inputs"].get(input_name)
        if not is_link(link):
            raise NodeFailed(
                f"Node {node_id} says it needs input {input_name}, but nothing is linked to it",
                exception_type="graph.NodeInputError",
            )
        self._connect(link[0], node_id)

    def sees(self, node_id: str, source: str) -> bool:
        """Checks whether the node may use the result of `source`. Results of lazy inputs can only
        be used after `require`."""
        return source in self._linked.get(node_id, ())

    def pick(self) -> str:
        """Returns the next node to run."""
        ready = [node_id for node_id, count in self._blockers.items() if count == 0]
        if not ready:
            raise DependencyCycle(next(iter(self._blockers)))
        for steps in range(STEPS_BEFORE_OUTPUT_MAX + 1):
            for node_id in ready:
                if self._leads_to_output(node_id, steps):
                    return node_id
        return ready[0]

    def complete(self, node_id: str) -> None:
        del self._blockers[node_id]
        for waiter in self._waiters.pop(node_id):
            self._blockers[waiter] -= 1

    def _eager_sources(self, node_id: str) -> list[str]:
        sources = []
        for name, value in self._prompt[node_id]["inputs"].items():
            if not is_link(value) or self._is_lazy(node_id, name):
                continue
            if value[0] not in self._prompt:
                raise MissingNode(node_id, value[0])
            sources.append(value[0])
        return sources

    def _connect(self, source: str, target: str) -> None:
        self._linked.setdefault(target, set()).add(source)
        if self._is_cached(source):
            return
        self.add(source)
        if target not in self._waiters[source]:
            self._waiters[source][target] = None
            self._blockers[target] += 1

    def _leads_to_output(self, node_id: str, steps: int) -> bool:
        if steps == 0:
            return self._is_output(node_id)
        return any(self._leads_to_output(next_id, steps - 1) for next_id in self._waiters[node_id])


@dataclass(frozen=True, slots=True)
class CachedResult:
    """The outputs of a node, and its entry in the history (with the node that created it)."""

    outputs: tuple[Any, ...] = ()
    ui: Mapping[str, Any] | None = None


class NodeCache:
    """Stores the results of the last prompt. Only the executor thread uses the cache."""

    def __init__(self) -> None:
        self._entries: dict[str, CachedResult] = {}

    def get(self, signature: str) -> CachedResult | None:
        return self._entries.get(signature)

    def put(self, signature: str, entry: CachedResult) -> None:
        self._entries[signature] = entry

    def retain(self, signatures: Collection[str]) -> None:
        """Keeps only the results with these signatures, because older results aren't worth their
        memory.
        """
        remaining = self._entries.keys() & set(signatures)
        self._entries = {signature: self._entries[signature] for signature in remaining}


DIGEST_BYTES = 16


class NodeSigner:
    """Computes a signature for each node, which is its key in the cache. Values that can't be
    compared get a unique signature."""

    def __init__(self, nodes: Mapping[str, EngineNodeType]) -> None:
        self._nodes = nodes
        self._unique = itertools.count()

    def sign(self, prompt: Prompt) -> dict[str, str]:
        """Returns the signatures of all nodes. Doesn't use recursion, because a prompt may be
        deeper than Python's stack."""
        signed: dict[str, str] = {}
        opened: set[str] = set()
        waiting = list(prompt)
        while waiting:
            node_id = waiting[-1]
            before = [
                source
                for source in _sources(prompt[node_id])
                if source in prompt and source not in signed and source not in opened
            ]
            if before and node_id not in signed:
                opened.add(node_id)
                waiting += before
                continue
            waiting.pop()
            if node_id not in signed:
                signed[node_id] = self._digest(node_id, prompt[node_id], signed)
        return signed

    def _digest(self, node_id: str, node: Mapping[str, Any], signed: Mapping[str, str]) -> str:
        kind = self._nodes[node["class_type"]]
        parts = [repr(kind.name)]
        if kind.fingerprint:
            parts.append(self._canonical(node.get("is_changed")))
        if "UNIQUE_ID" in kind.info["input"].get("hidden", {}).values():
            parts.append(repr(node_id))
        for name, value in sorted(node.get("inputs", {}).items()):
            parts.append(f"{name!r}={self._value(value, signed)}")
        text = ";".join(parts).encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, digest_size=DIGEST_BYTES).hexdigest()

    def _value(self, value: Any, signed: Mapping[str, str]) -> str:
        if not is_link(value):
            return self._canonical(value)
        # A source that is missing or part of a cycle has no signature.
        source = signed.get(value[0]) or self._unique_signature()
        return f"<{source}:{self._canonical(value[1])}>"

    def _canonical(self, value: Any) -> str:
        """Returns a representation that is equal for values that Python considers equal, such as 1,
        1.0 and true."""
        match value:
            case str() | None:
                return repr(value)
            case int() | float():
                return self._number(value)
            case list() | tuple():
                return f"[{','.join(map(self._canonical, value))}]"
            case dict():
                entries = (f"{key!r}:{self._canonical(value[key])}" for key in sorted(value))
                return f"{{{','.join(entries)}}}"
        return self._unique_signature()

    def _number(self, value: float) -> str:
        if math.isnan(value):
            return self._unique_signature()
        whole = math.isfinite(value) and value == int(value)
        return str(int(value)) if whole else repr(value)

    def _unique_signature(self) -> str:
        return f"?{next(self._unique)}"


def _sources(node: Mapping[str, Any]) -> Iterator[str]:
    return (value[0] for value in node.get("inputs", {}).values() if is_link(value))


class RunHalted(Exception):
    """Raised to end the run. Contains the message to send."""

    def __init__(self, event: str, node_id: str, **data: Any) -> None:
        super().__init__(event)
        self.event = event
        self.node_id = node_id
        self.data = data


@dataclass(frozen=True, slots=True)
class RunTools:
    """The objects that a run uses and that continue to exist after it."""

    nodes: Mapping[str, EngineNodeType]
    cache: NodeCache
    signer: NodeSigner
    clock: Callable[[], float]
    random: Random
    memory_of: Callable[[str, str], MutableMapping[str, Any]]
    announce: Callable[[Any, str], None]


@dataclass
class CollectedInputs:
    """The arguments for a node's call, and the names of inputs without a value."""

    values: dict[str, Any] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)

    def known(self) -> dict[str, Any]:
        return {name: value for name, value in self.values.items() if name not in self.missing}


class PromptRun:
    """Runs a prompt.

    `success` is the result of the previous run. ComfyUI reports the status of the last node that
    ended, so a run that stops before its first node inherits it. Clients must not rely on this.
    """

    def __init__(
        self, tools: RunTools, context: RunContext, outputs: tuple[str, ...], *, success: bool
    ) -> None:
        self._tools = tools
        self._context = context
        self._outputs = outputs
        self._success = success
        self._messages = RunMessages(context, tools.clock, tools.announce)
        self._declarations: dict[str, dict[str, DeclaredInput]] = {}
        self._executed: list[str] = []
        self._shown: dict[str, Mapping[str, Any]] = {}
        self._signatures: dict[str, str] = {}
        self._entries: dict[str, CachedResult] = {}
        self._schedule = Schedule(
            context.prompt,
            is_cached=self._is_cached,
            is_output=lambda node_id: self._type_of(node_id).is_output,
            is_lazy=self._is_lazy,
        )

    def execute(self, *, dangling_link_kills: bool = False) -> RunOutcome:
        self._messages.send("execution_start")
        self._messages.send("execution_cached", nodes=self._find_cached())
        try:
            self._work()
        except RunHalted as halt:
            self._send_halt(halt)
        except DependencyCycle as cycle:
            self._send_halt(_end_stuck_run(cycle, cycle.node_id, self._context.prompt))
        except MissingNode as missing:
            if dangling_link_kills:
                raise
            self._success = False
            self._send_halt(_end_stuck_run(missing, missing.node_id, self._context.prompt))
        return RunOutcome(
            success=self._success,
            messages=self._messages.messages,
            outputs={node_id: ui["output"] for node_id, ui in self._shown.items()},
            meta={node_id: ui["meta"] for node_id, ui in self._shown.items()},
        )

    def _work(self) -> None:
        for output in self._outputs:
            self._schedule.add(output)
        while self._schedule:
            node_id = self._schedule.pick()
            self._success = False
            finished = self._visit(node_id)
            self._success = True
            # The cache is cleaned only after the first node, because the results of the previous
            # run must remain cached if that node fails.
            self._tools.cache.retain(self._signatures.values())
            if finished:
                self._schedule.complete(node_id)
        self._show_cached_results()
        self._messages.send("execution_success")

    def _find_cached(self) -> list[str]:
        self._signatures = self._tools.signer.sign(self._context.prompt)
        for signature in set(self._signatures.values()):
            if entry := self._tools.cache.get(signature):
                self._entries[signature] = entry
        return [node_id for node_id in self._context.prompt if self._is_cached(node_id)]

    def _visit(self, node_id: str) -> bool:
        """Runs the node or uses its cached result. Returns False if the node must wait for a lazy
        input."""
        if entry := self._entries.get(self._signatures[node_id]):
            self._reuse(node_id, entry)
            self._finish(node_id)
            return True
        self._context.progress.start(node_id)
        self._context.send_progress()
        inputs = CollectedInputs()
        try:
            self._collect(node_id, inputs)
            self._messages.executing(node_id)
            self._context.stop_if_interrupted()
            if self._require_lazy(node_id, inputs):
                return False
            result = self._call(node_id, inputs)
        except Interrupted as error:
            raise RunHalted("execution_interrupted", node_id) from error
        except Exception as error:
            raise self._failure(node_id, inputs, error) from error
        self._store_result(node_id, result)
        self._finish(node_id)
        self._executed.append(node_id)
        return True

    def _collect(self, node_id: str, inputs: CollectedInputs) -> None:
        """Collects the values of the declared inputs, and of all links, including undeclared
        ones."""
        declared = self._declared(node_id)
        for name, value in self._context.prompt[node_id]["inputs"].items():
            if is_link(value):
                self._follow(node_id, name, value, inputs)
            elif name in declared:
                inputs.values[name] = value

    def _follow(self, node_id: str, name: str, link: list[Any], inputs: CollectedInputs) -> None:
        source, slot = link
        entry = self._entries.get(self._signatures.get(source, ""))
        if entry and self._schedule.sees(node_id, source) and slot < len(entry.outputs):
            inputs.values[name] = entry.outputs[slot]
        else:
            inputs.values[name] = None
            inputs.missing.add(name)

    def _require_lazy(self, node_id: str, inputs: CollectedInputs) -> bool:
        needed = self._type_of(node_id).needed
        if needed is None:
            return False
        required = [name for name in needed(inputs.known()) if name not in inputs.known()]
        for name in required:
            self._schedule.require(node_id, name)
        return bool(required)

    def _call(self, node_id: str, inputs: CollectedInputs) -> NodeResult:
        kind = self._type_of(node_id)
        declared = self._declared(node_id)
        for name in inputs.values:
            if name not in declared:
                raise NodeFailed(
                    f"{python_name(kind)}() got an unexpected keyword argument '{name}'",
                    exception_type="TypeError",
                )
        context: Context = NodeContext(
            context=self._context,
            node_id=node_id,
            random=self._tools.random,
            memory=self._tools.memory_of(node_id, kind.name),
            started_at=datetime.fromtimestamp(self._tools.clock()),  # noqa: DTZ006 - local time for file names
        )
        return kind.run(context, **inputs.values)

    def _store_result(self, node_id: str, result: NodeResult) -> None:
        ui = None
        if result.ui:
            meta = {"node_id": node_id, "display_node": node_id, "parent_node": None}
            ui = {"meta": {**meta, "real_node_id": node_id}, "output": result.ui}
            self._shown[node_id] = ui
            self._messages.executed(node_id, result.ui)
        entry = CachedResult(outputs=result.outputs, ui=ui)
        self._entries[self._signatures[node_id]] = entry
        self._tools.cache.put(self._signatures[node_id], entry)

    def _reuse(self, node_id: str, entry: CachedResult) -> None:
        if entry.ui:
            self._shown[node_id] = entry.ui
        self._messages.executed(node_id, entry.ui["output"] if entry.ui else None)

    def _show_cached_results(self) -> None:
        """Adds cached results to the history if nodes show them, even if this run didn't need
        them."""
        for node_id in self._context.prompt:
            entry = self._entries.get(self._signatures[node_id])
            shows = self._type_of(node_id).info["has_intermediate_output"]
            if entry and shows and node_id not in self._executed:
                self._reuse(node_id, entry)

    def _finish(self, node_id: str) -> None:
        self._context.progress.finish(node_id)
        self._context.send_progress()

    def _failure(self, node_id: str, inputs: CollectedInputs, error: Exception) -> RunHalted:
        return RunHalted(
            "execution_error",
            node_id,
            exception_message=f"{error}\n",
            exception_type=type_name(error),
            traceback=traceback_lines(error),
            current_inputs=self._show_inputs(node_id, inputs),
            current_outputs=list(self._context.prompt),
        )

    def _show_inputs(self, node_id: str, inputs: CollectedInputs) -> dict[str, list[Any]]:
        values = dict(inputs.values)
        for name, kind in self._type_of(node_id).info["input"].get("hidden", {}).items():
            # Newer nodes declare their hidden inputs as lists and don't receive them as arguments.
            if kind == "PROMPT":
                values[name] = self._context.prompt
            elif kind == "EXTRA_PNGINFO":
                values[name] = self._context.extra_pnginfo
        return {name: [_shown(value)] for name, value in values.items()}

    def _send_halt(self, halt: RunHalted) -> None:
        node_type = self._context.prompt[halt.node_id]["class_type"]
        self._messages.send(
            halt.event,
            to_all=halt.event == "execution_interrupted",
            node_id=halt.node_id,
            node_type=node_type,
            executed=list(self._executed),
            **halt.data,
        )

    def _type_of(self, node_id: str) -> EngineNodeType:
        return self._tools.nodes[self._context.prompt[node_id]["class_type"]]

    def _declared(self, node_id: str) -> dict[str, DeclaredInput]:
        if node_id not in self._declarations:
            inputs = self._context.prompt[node_id]["inputs"]
            groups = self._type_of(node_id).info["input"]
            self._declarations[node_id] = declared_inputs(groups, inputs)
        return self._declarations[node_id]

    def _is_cached(self, node_id: str) -> bool:
        return self._signatures[node_id] in self._entries

    def _is_lazy(self, node_id: str, name: str) -> bool:
        declared = self._declared(node_id).get(name)
        return declared is not None and bool(declared.options.get("lazy"))


def _end_stuck_run(error: NodeFailed, node_id: str, prompt: Prompt) -> RunHalted:
    """Returns the end of a run that can't continue although no node failed."""
    return RunHalted(
        "execution_error",
        node_id,
        exception_message=error.message,
        exception_type=type_name(error),
        traceback=[],
        current_inputs=[],
        current_outputs=list(prompt),
    )


def _shown(value: Any) -> Any:
    return value if value is None or isinstance(value, int | float | str) else str(value)
