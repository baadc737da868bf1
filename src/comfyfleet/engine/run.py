"""One run of one prompt: which nodes run, what is reused, what is told to whom."""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from datetime import datetime
from random import Random
from typing import Any

from comfyfleet.engine.cache import Entry, NodeCache
from comfyfleet.engine.context import NodeContext, Surroundings
from comfyfleet.engine.faults import trace, type_name
from comfyfleet.engine.history import Outcome
from comfyfleet.engine.inputs import Declared, declared_inputs, is_link
from comfyfleet.engine.node import Context, NodeType, Result
from comfyfleet.engine.python_names import python_name
from comfyfleet.engine.schedule import DependencyCycle, MissingNode, Schedule
from comfyfleet.engine.signature import Signer
from comfyfleet.engine.story import Story
from comfyfleet.engine.validate import Prompt
from comfyfleet.kernel.errors import Interrupted, NodeFailed


class Halt(Exception):
    """The run ends here; carries what is to be told."""

    def __init__(self, event: str, node_id: str, **data: Any) -> None:
        super().__init__(event)
        self.event = event
        self.node_id = node_id
        self.data = data


@dataclass(frozen=True, slots=True)
class Tools:
    """What outlives a run."""

    nodes: Mapping[str, NodeType]
    cache: NodeCache
    signer: Signer
    clock: Callable[[], float]
    random: Random
    memory_of: Callable[[str, str], MutableMapping[str, Any]]
    announce: Callable[[Any, str], None]


@dataclass
class Inputs:
    """The values that a node is called with, and the names whose value is not there yet."""

    values: dict[str, Any] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)

    def known(self) -> dict[str, Any]:
        return {name: value for name, value in self.values.items() if name not in self.missing}


class Run:
    """`success` comes in from the run before: ComfyUI takes its verdict from the last node that
    ended, so a run that stops before its first node inherits it. Clients must not trust it."""

    def __init__(
        self, tools: Tools, around: Surroundings, outputs: tuple[str, ...], *, success: bool
    ) -> None:
        self._tools = tools
        self._around = around
        self._outputs = outputs
        self._success = success
        self._story = Story(around, tools.clock, tools.announce)
        self._declarations: dict[str, dict[str, Declared]] = {}
        self._executed: list[str] = []
        self._shown: dict[str, Mapping[str, Any]] = {}
        self._signatures: dict[str, str] = {}
        self._entries: dict[str, Entry] = {}
        self._schedule = Schedule(
            around.prompt,
            is_cached=self._is_cached,
            is_output=lambda node_id: self._type_of(node_id).is_output,
            is_lazy=self._is_lazy,
        )

    def execute(self, *, dangling_link_kills: bool = False) -> Outcome:
        self._story.tell("execution_start")
        self._story.tell("execution_cached", nodes=self._find_cached())
        try:
            self._work()
        except Halt as halt:
            self._tell_halt(halt)
        except DependencyCycle as cycle:
            self._tell_halt(_stuck(cycle, cycle.node_id, self._around.prompt))
        except MissingNode as missing:
            if dangling_link_kills:
                raise
            self._success = False
            self._tell_halt(_stuck(missing, missing.node_id, self._around.prompt))
        return Outcome(
            success=self._success,
            messages=self._story.messages,
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
            # Not before: a run whose first node fails leaves the results of the one before.
            self._tools.cache.retain(self._signatures.values())
            if finished:
                self._schedule.complete(node_id)
        self._show_cached_results()
        self._story.tell("execution_success")

    def _find_cached(self) -> list[str]:
        self._signatures = self._tools.signer.sign(self._around.prompt)
        for signature in set(self._signatures.values()):
            if entry := self._tools.cache.get(signature):
                self._entries[signature] = entry
        return [node_id for node_id in self._around.prompt if self._is_cached(node_id)]

    def _visit(self, node_id: str) -> bool:
        """Run the node or take its cached result; False when it must wait for a lazy input."""
        if entry := self._entries.get(self._signatures[node_id]):
            self._reuse(node_id, entry)
            self._finish(node_id)
            return True
        self._around.progress.start(node_id)
        self._around.tell_progress()
        inputs = self._collect(node_id)
        self._story.executing(node_id)
        try:
            self._around.stop_if_interrupted()
            if self._require_lazy(node_id, inputs):
                return False
            result = self._call(node_id, inputs)
        except Interrupted as error:
            raise Halt("execution_interrupted", node_id) from error
        except Exception as error:
            raise self._failure(node_id, inputs, error) from error
        self._keep(node_id, result)
        self._finish(node_id)
        self._executed.append(node_id)
        return True

    def _collect(self, node_id: str) -> Inputs:
        """Values of the declared inputs, and of every link, even one that nobody declared."""
        declared = self._declared(node_id)
        inputs = Inputs()
        for name, value in self._around.prompt[node_id]["inputs"].items():
            if is_link(value):
                self._follow(node_id, name, value, inputs)
            elif name in declared:
                inputs.values[name] = value
        return inputs

    def _follow(self, node_id: str, name: str, link: list[Any], inputs: Inputs) -> None:
        source, slot = link
        entry = self._entries.get(self._signatures.get(source, ""))
        if entry and self._schedule.sees(node_id, source) and slot < len(entry.outputs):
            inputs.values[name] = entry.outputs[slot]
        else:
            inputs.values[name] = None
            inputs.missing.add(name)

    def _require_lazy(self, node_id: str, inputs: Inputs) -> bool:
        needed = self._type_of(node_id).needed
        if needed is None:
            return False
        wanted = [name for name in needed(inputs.known()) if name not in inputs.known()]
        for name in wanted:
            self._schedule.require(node_id, name)
        return bool(wanted)

    def _call(self, node_id: str, inputs: Inputs) -> Result:
        kind = self._type_of(node_id)
        declared = self._declared(node_id)
        for name in inputs.values:
            if name not in declared:
                raise NodeFailed(
                    f"{python_name(kind)}() got an unexpected keyword argument '{name}'",
                    exception_type="TypeError",
                )
        context: Context = NodeContext(
            around=self._around,
            node_id=node_id,
            random=self._tools.random,
            memory=self._tools.memory_of(node_id, kind.name),
            started_at=datetime.fromtimestamp(self._tools.clock()),  # noqa: DTZ006 - local: file names
        )
        return kind.run(context, **inputs.values)

    def _keep(self, node_id: str, result: Result) -> None:
        ui = None
        if result.ui:
            meta = {"node_id": node_id, "display_node": node_id, "parent_node": None}
            ui = {"meta": {**meta, "real_node_id": node_id}, "output": result.ui}
            self._shown[node_id] = ui
            self._story.executed(node_id, result.ui)
        entry = Entry(outputs=result.outputs, ui=ui)
        self._entries[self._signatures[node_id]] = entry
        self._tools.cache.put(self._signatures[node_id], entry)

    def _reuse(self, node_id: str, entry: Entry) -> None:
        if entry.ui:
            self._shown[node_id] = entry.ui
        self._story.executed(node_id, entry.ui["output"] if entry.ui else None)

    def _show_cached_results(self) -> None:
        """Nodes that show a result without being outputs were not visited when cached."""
        for node_id in self._around.prompt:
            entry = self._entries.get(self._signatures[node_id])
            shows = self._type_of(node_id).info["has_intermediate_output"]
            if entry and shows and node_id not in self._executed:
                self._reuse(node_id, entry)

    def _finish(self, node_id: str) -> None:
        self._around.progress.finish(node_id)
        self._around.tell_progress()

    def _failure(self, node_id: str, inputs: Inputs, error: Exception) -> Halt:
        return Halt(
            "execution_error",
            node_id,
            exception_message=f"{error}\n",
            exception_type=type_name(error),
            traceback=trace(error),
            current_inputs=self._show_inputs(node_id, inputs),
            current_outputs=list(self._around.prompt),
        )

    def _show_inputs(self, node_id: str, inputs: Inputs) -> dict[str, list[Any]]:
        values = dict(inputs.values)
        for name, kind in self._type_of(node_id).info["input"].get("hidden", {}).items():
            # Newer nodes, whose hidden inputs are written as lists, don't get them as arguments.
            if kind == "PROMPT":
                values[name] = self._around.prompt
            elif kind == "EXTRA_PNGINFO":
                values[name] = self._around.extra_pnginfo
        return {name: [_shown(value)] for name, value in values.items()}

    def _tell_halt(self, halt: Halt) -> None:
        node_type = self._around.prompt[halt.node_id]["class_type"]
        self._story.tell(
            halt.event,
            to_all=halt.event == "execution_interrupted",
            node_id=halt.node_id,
            node_type=node_type,
            executed=list(self._executed),
            **halt.data,
        )

    def _type_of(self, node_id: str) -> NodeType:
        return self._tools.nodes[self._around.prompt[node_id]["class_type"]]

    def _declared(self, node_id: str) -> dict[str, Declared]:
        if node_id not in self._declarations:
            given = self._around.prompt[node_id]["inputs"]
            groups = self._type_of(node_id).info["input"]
            self._declarations[node_id] = declared_inputs(groups, given)
        return self._declarations[node_id]

    def _is_cached(self, node_id: str) -> bool:
        return self._signatures[node_id] in self._entries

    def _is_lazy(self, node_id: str, name: str) -> bool:
        declared = self._declared(node_id).get(name)
        return declared is not None and bool(declared.options.get("lazy"))


def _stuck(error: NodeFailed, node_id: str, prompt: Prompt) -> Halt:
    """The run can't go on, though no node has failed."""
    return Halt(
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
