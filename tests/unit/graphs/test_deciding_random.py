"""Random graphs that decide, against a plain recursive interpreter: the same values, whatever order jobs end in."""

import json
import zlib
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.graphs.builders import document, node
from tests.unit.graphs.random_graphs import ANYTHING, BACKENDS, RANDOM_CATALOGUE
from tests.unit.graphs.simulation import NOW, RUN_ID, Simulation, picture, plan_for, simulate
from tests.unit.graphs.test_decide_random import check_kept

from comfyfleet.api.expressions import (
    MISSING,
    FieldPath,
    evaluate_condition,
    parse_condition,
    value_at,
)
from comfyfleet.api.templates import fill, parse_templates, templates_in
from comfyfleet.server.graphs.run import (
    Choice,
    Environment,
    Event,
    ExecutionKey,
    ExecutionStatus,
    GraphRunState,
    GraphRunStatus,
    JobDone,
    JobFailed,
    QuestionAnswered,
    StartJob,
)
from comfyfleet.server.graphs.snapshot import dump_plan, load_plan

SEEDS = st.integers(0, 2**32)
UNTIL = "output.width % 3 == 0"
CASES = [{"name": "odd", "when": "output % 2 == 1"}, {"name": "large", "when": "output > 500"}]


def chance(*what: object) -> int:
    return zlib.crc32(json.dumps(what, sort_keys=True, default=str).encode())


def fails(properties: Mapping[str, Any]) -> bool:
    return chance("fails", properties) % 7 == 0


def made(properties: Mapping[str, Any]) -> dict[str, Any]:
    """What a job makes: it depends on nothing but what it is given."""
    file = picture(f"p{chance(properties)}")
    return {"images": [file], "files": [file], "width": chance("width", properties) % 1000}


class Maker:
    """Makes documents; every reference is to a node before it."""

    def __init__(self, rng: Random, size: int) -> None:
        self.rng = rng
        self.nodes: list[dict[str, Any]] = [node("number", "input"), node("list", "input")]
        self.links: list[str] = []
        self.numbers = ["number"]  # as templates read them
        self.sources = ["number.value"]  # as wires begin
        self.lists = ["list"]
        for count in range(size):
            make = rng.choice([self.value, self.work, self.switch, self.map, self.loop, self.score])
            make(f"n{count}")
        for count, source in enumerate(self.sources):
            if rng.random() < 0.5:
                self.nodes.append(node(f"out{count}", "output"))
                self.links.append(f"{source} > out{count}.value")
        self.nodes.append(node("last", "output"))
        self.links.append(f"{self.sources[-1]} > last.value")

    def number(self, *more: str) -> str:
        return self.rng.choice([*self.numbers[-6:], *more])

    def template(self, *more: str) -> str:
        first, second = self.number(*more), self.number(*more)
        return self.rng.choice(
            [
                f"{{{{ {first} }}}}",
                f"{{{{ {first} + {second} }}}}",
                f"{{{{ {first} | default(3) }}}}",
            ]
        )

    def job(self, *more: str) -> dict[str, Any]:
        properties = {"must": self.template(*more), "may": self.template(*more)}
        return {"workflow": "anything", "properties": properties, "continue_on_error": True}

    def add(self, name: str, kind: str, **fields: Any) -> None:
        self.nodes.append(node(name, kind, **fields))

    def value(self, name: str) -> None:
        self.add(name, "value", values={"a": self.template(), "b": self.rng.randint(0, 9)})
        self.numbers += [f"{name}.a", f"{name}.b"]
        self.sources += [f"{name}.a"]

    def work(self, name: str) -> None:
        self.add(name, "workflow", **self.job())
        self.numbers.append(f"{name}.output.width")
        self.sources.append(f"{name}.output")

    def switch(self, name: str) -> None:
        self.add(name, "switch", cases=CASES)
        self.links.append(f"{self.rng.choice(self.sources[:1])} > {name}.input")
        self.numbers += [f"{name}.{port}" for port in ("odd", "large", "default")]
        self.sources.append(f"{name}.default")

    def map(self, name: str) -> None:
        do: dict[str, Any] = self.job("item", "index")
        if self.rng.random() < 0.4:
            inner = node("again", "loop", do=self.job("item", "round"), until=UNTIL, at_most=3)
            do = {"nodes": [inner], "result": "again.output"}
        self.add(
            name, "map", over=self.rng.choice(self.lists), do=do, continue_on_error=True,
            at_once=self.rng.choice([None, 1, 2]),
        )  # fmt: skip
        self.numbers.append(f"{name}.output.count")
        self.sources.append(f"{name}.output")

    def loop(self, name: str) -> None:
        best = {"best": "output.width"} if self.rng.random() < 0.5 else {}
        at_most = self.rng.randint(1, 4)
        do = self.job("round", "previous.width")
        start = {"width": self.template()}
        self.add(name, "loop", start=start, do=do, until=UNTIL, at_most=at_most, **best)
        self.numbers += [f"{name}.rounds", f"{name}.output.width"]
        self.sources.append(f"{name}.output")

    def score(self, name: str) -> None:
        fields = {"workflow": "anything", "property": "must", "score": "output.width"}
        self.add(name, "score", over=self.rng.choice(self.lists), keep=2, **fields)
        self.sources.append(f"{name}.output")

    def document(self) -> dict[str, Any]:
        nodes = [{k: v for k, v in each.items() if v is not None} for each in self.nodes]
        return document(*nodes, links=tuple(self.links))


# The interpreter: each node in its turn, each item and round by recursion.

DEAD = object()


class Interpreter:
    def __init__(self, graph: dict[str, Any], inputs: dict[str, Any]) -> None:
        self.wires = {each["to"]: each["from"] for each in graph["connections"]}
        self.jobs = 0
        self.named: dict[str, Any] = {}  # by node: its ports, or DEAD
        self.outputs: dict[str, Any] = {}
        for each in graph["nodes"]:
            if each["type"] == "input":
                self.named[each["id"]] = {"value": inputs[each["id"]]}
            elif each["type"] == "output":
                value = self.at(self.wires[f"{each['id']}.value"], {})
                if value is not DEAD:
                    self.outputs[each["id"]] = value
            else:
                self.named[each["id"]] = self.node(each, {})

    def at(self, path: str, words: Mapping[str, Any]) -> Any:
        root, *rest = path.split(".")
        if root in words:
            return value_at(words[root], tuple(rest))
        ports = self.named[root]
        if "value" in (ports if ports is not DEAD else {}) and rest[:1] != ["value"]:
            rest = ["value", *rest] if root in ("number", "list") else rest
        if ports is DEAD or not rest or rest[0] not in ports:
            return DEAD
        return value_at(ports[rest[0]], tuple(rest[1:]))

    def filled(self, value: Any, words: Mapping[str, Any]) -> Any:
        """DEAD if it needs something that never came."""
        parsed = parse_templates(value, None)
        needed = [str(path) for each in templates_in(parsed) for path in each.needed_paths]
        if any(self.at(path, words) is DEAD for path in needed):
            return DEAD

        def read(path: FieldPath) -> Any:
            found = self.at(str(path), words)
            return MISSING if found is DEAD else found

        return fill(parsed, read)

    def job(self, do: Mapping[str, Any], words: Mapping[str, Any]) -> Any:
        properties = {name: self.filled(each, words) for name, each in do["properties"].items()}
        if any(each is DEAD for each in properties.values()):
            return DEAD
        if fails(properties):
            return DEAD
        self.jobs += 1
        return made(properties)

    def node(self, each: Mapping[str, Any], words: Mapping[str, Any]) -> Any:
        match each["type"]:
            case "value":
                values = {name: self.filled(value, words) for name, value in each["values"].items()}
                alive = {name: value for name, value in values.items() if value is not DEAD}
                return alive or DEAD
            case "workflow":
                output = self.job(each, words)
                return DEAD if output is DEAD else {"output": output}
            case "switch":
                return self.switch(each)
            case "map":
                return self.map(each, words)
            case "loop":
                return self.loop(each, words)
        return self.score(each)

    def switch(self, each: Mapping[str, Any]) -> Any:
        value = self.at(self.wires[f"{each['id']}.input"], {})
        for case in each["cases"]:
            if evaluate_condition(parse_condition(case["when"]), {"output": value}).value:
                return {case["name"]: value}
        return {"default": value}

    def map(self, each: Mapping[str, Any], words: Mapping[str, Any]) -> Any:
        rows: list[dict[str, Any]] = []
        pictures: list[Any] = []
        for index, item in enumerate(self.at(each["over"], words)):
            inner = {**words, "item": item, "index": index}
            if "nodes" in each["do"]:
                found = self.loop(each["do"]["nodes"][0], inner)
                output = DEAD if found is DEAD else found["output"]
            else:
                output = self.job(each["do"], inner)
            row = {"index": index, "item": item}
            rows.append(row | ({"error": True} if output is DEAD else {"output": output}))
            pictures += [] if output is DEAD else output["images"]
        failed = sum("error" in row for row in rows)
        return {
            "output": {"results": rows, "count": len(rows), "failed": failed, "images": pictures}
        }

    def loop(self, each: Mapping[str, Any], words: Mapping[str, Any]) -> Any:
        start = {name: self.filled(value, words) for name, value in each.get("start", {}).items()}
        if any(value is DEAD for value in start.values()):
            return DEAD
        return self.round(each, words, start, [])

    def round(
        self, each: Mapping[str, Any], words: Mapping[str, Any], previous: Any, results: list[Any]
    ) -> Any:
        inner = {**words, "previous": previous, "round": len(results) + 1}
        output = self.job(each["do"], inner)
        results = [*results, output]
        named = {"output": output, "previous": previous, "round": len(results)}
        is_done = output is DEAD or evaluate_condition(parse_condition(each["until"]), named).value
        if not is_done and len(results) < each["at_most"]:
            return self.round(each, words, output, results)
        alive = [each for each in results if each is not DEAD]
        if not alive:
            return DEAD
        best = max(alive, key=lambda found: found["width"]) if "best" in each else alive[-1]
        score = best["width"] if "best" in each else None
        done = output is not DEAD and is_done
        return {"output": best, "rounds": len(results), "done": done, "score": score}

    def score(self, each: Mapping[str, Any]) -> Any:
        scored = []
        for index, item in enumerate(self.at(each["over"], {})):
            output = made({"must": item})
            self.jobs += 1
            scored.append({"index": index, "item": item, "score": output["width"]})
        scored.sort(key=lambda row: (-row["score"], row["index"]))
        best = scored[:2]
        score = best[0]["score"] if best else None
        return {"output": {"scored": scored, "best": best, "images": [], "score": score}}


def without_words(value: Any) -> Any:
    """Errors are told in words that the interpreter doesn't know."""
    if isinstance(value, Mapping):
        return {k: True if k == "error" else without_words(each) for k, each in value.items()}
    if isinstance(value, list):
        return [without_words(each) for each in value]
    return value


def outcome(job: StartJob) -> Event:
    if set(job.properties) == {"must"}:  # of a judge, which never fails
        return JobDone(job.key, job.attempt, made(job.properties))
    if fails(job.properties):
        return JobFailed(job.key, job.attempt, "no")
    return JobDone(job.key, job.attempt, made(job.properties))


def nobody_asks(key: ExecutionKey, times: int) -> QuestionAnswered:
    return QuestionAnswered(key, Choice.FAIL)


def check_alike(seed: int, size: int, order: int) -> None:
    graph = Maker(Random(seed), size).document()
    inputs = {"number": seed % 10, "list": [seed % 5, *range(seed % 4)]}
    plan = load_plan(json.loads(json.dumps(dump_plan(plan_for(graph, RANDOM_CATALOGUE)))))
    rng = Random(order)
    environment = Environment(NOW, BACKENDS, in_queue_max=rng.choice([1, 3, 50]))
    run = simulate(
        Simulation(plan, GraphRunState(RUN_ID, inputs), environment), rng, outcome, nobody_asks
    ).run
    expected = Interpreter(graph, inputs)
    assert run.status == GraphRunStatus.COMPLETED, run.error
    assert without_words(run.outputs) == expected.outputs
    done = [
        k
        for k, each in run.records.items()
        if k.node in plan.workflows and each.status == ExecutionStatus.DONE
    ]
    assert len(done) == expected.jobs
    assert run.tokens == ANYTHING.price_tokens * len(done)
    assert run.open_count == 0


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 25), SEEDS)
def test_a_run_gives_what_plain_recursion_gives(seed: int, size: int, order: int) -> None:
    check_alike(seed, size, order)


@settings(max_examples=15, deadline=None)
@given(SEEDS, st.integers(1, 25), SEEDS)
def test_a_run_can_be_written_down_and_read_again_at_any_moment(
    seed: int, size: int, order: int
) -> None:
    plan, rng = plan_for(Maker(Random(seed), size).document(), RANDOM_CATALOGUE), Random(order)
    inputs = {"number": seed % 10, "list": [seed % 5, *range(seed % 4)]}
    environment = Environment(NOW, BACKENDS, in_queue_max=2)
    simulation = Simulation(plan, GraphRunState(RUN_ID, inputs), environment)
    simulation.start()
    while simulation.jobs:
        if rng.random() < 0.3:
            check_kept(simulation)
        simulation.tell(outcome(simulation.jobs.pop(rng.choice(sorted(simulation.jobs)))))
    check_kept(simulation)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(SEEDS, st.integers(1, 60), SEEDS)
def test_a_run_gives_what_plain_recursion_gives_deep(seed: int, size: int, order: int) -> None:
    check_alike(seed, size, order)
