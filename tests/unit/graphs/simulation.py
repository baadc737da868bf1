"""Plays the world to a run: jobs that end in any order, and people who answer."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from random import Random
from typing import Any
from uuid import UUID

from tests.unit.graphs.builders import CATALOGUE, WORKERS

from comfyfleet.api.graph_model import RoundsNode
from comfyfleet.api.graph_parse import parse_graph
from comfyfleet.server.graphs.catalogue import GraphCatalogue
from comfyfleet.server.graphs.decide import decide_cancel, decide_retry, next_actions
from comfyfleet.server.graphs.draft import RunDecision
from comfyfleet.server.graphs.expand import NO_GRAPHS, GraphLibrary
from comfyfleet.server.graphs.plan import RunPlan, plan_of
from comfyfleet.server.graphs.run import (
    Action,
    AskUser,
    CancelJob,
    Choice,
    Environment,
    Event,
    ExecutionKey,
    ExecutionRecord,
    ExecutionStatus,
    FailRun,
    GraphRunState,
    GraphRunStatus,
    JobCancelled,
    JobDone,
    JobFailed,
    JobStarted,
    QuestionAnswered,
    StartJob,
)

RUN_ID = UUID(int=7)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
WORLD = Environment(NOW, WORKERS)


def picture(name: str) -> dict[str, Any]:
    return {"file_id": name, "path": f"files/{name}.png", "mime_type": "image/png"}


def result(name: str, **fields: Any) -> dict[str, Any]:
    file = picture(name)
    return {
        "images": [file], "files": [file], "width": 512, "height": 512, "prompt_id": name,
        "execution_time": 1.0, **fields,
    }  # fmt: skip


def plan_for(
    document: dict[str, Any],
    catalogue: GraphCatalogue = CATALOGUE,
    library: GraphLibrary = NO_GRAPHS,
) -> RunPlan:
    parsed = parse_graph(document)
    assert parsed.problems == ()
    return plan_of(parsed.graph, catalogue, library)


@dataclass
class Simulation:
    """Applies each decision, and checks what must hold after every one of them."""

    plan: RunPlan
    run: GraphRunState = field(default_factory=lambda: GraphRunState(RUN_ID))
    environment: Environment = WORLD
    actions: list[Action] = field(default_factory=list)
    jobs: dict[ExecutionKey, StartJob] = field(default_factory=dict)  # in flight
    stopping: dict[ExecutionKey, StartJob] = field(default_factory=dict)
    questions: dict[ExecutionKey, int] = field(default_factory=dict)  # how often asked
    asked: list[ExecutionKey] = field(default_factory=list)
    job_ids: set[UUID] = field(default_factory=set)
    ended: dict[ExecutionKey, ExecutionRecord] = field(default_factory=dict)
    slice_max: int | None = None
    cuts: int = 0  # slices after which a decision has gone on
    between: Callable[[GraphRunState], GraphRunState] = lambda run: run  # two slices

    def tell(self, *events: Event) -> list[Action]:
        actions = self.slice(*events)
        while self.run.is_cut:
            self.cuts += 1
            self.run = self.between(self.run)
            actions += self.slice()
        return actions

    def slice(self, *events: Event) -> list[Action]:
        """Makes one slice of a decision."""
        return self.follow(
            next_actions(self.plan, self.run, events, self.environment, slice_max=self.slice_max)
        )

    def cancel(self) -> list[Action]:
        return self.follow(decide_cancel(self.plan, self.run, self.environment))

    def retry(self, **how: Any) -> list[Action]:
        self.ended = {
            k: r
            for k, r in self.ended.items()
            if r.status in (ExecutionStatus.DONE, ExecutionStatus.SKIPPED)
        }
        return self.follow(decide_retry(self.plan, self.run, self.environment, **how))

    def follow(self, advance: RunDecision) -> list[Action]:
        for key in advance.changed:
            record = advance.run.record(key)
            if key in self.ended:
                assert self.as_ended(key, record) == self.as_ended(key, self.ended[key]), (
                    f"{key} ended twice"
                )
            if record.status.is_ended:
                self.ended[key] = record
        self.run = advance.run
        self.actions.extend(advance.actions)
        for action in advance.actions:
            self.carry_out(action)
        assert len(self.jobs) <= self.environment.in_queue_max
        assert set(self.jobs) == self.run.in_flight
        return list(advance.actions)

    def as_ended(self, key: ExecutionKey, record: ExecutionRecord) -> ExecutionRecord:
        """A loop gets rounds after it has begun."""
        is_loop = isinstance(self.plan.node(key.node), RoundsNode)
        return replace(record, outputs=None) if is_loop else record

    def carry_out(self, action: Action) -> None:
        match action:
            case StartJob():
                assert action.job_id not in self.job_ids
                assert action.key not in self.jobs
                self.job_ids.add(action.job_id)
                self.jobs[action.key] = action
            case CancelJob() if self.run.record(action.key).status == ExecutionStatus.STOPPING:
                self.stopping[action.key] = self.jobs.pop(action.key)
            case AskUser():
                self.questions[action.key] = self.questions.get(action.key, 0) + 1
                self.asked.append(action.key)

    # One word each, for tests that tell a story

    def start(self, **inputs: Any) -> list[Action]:
        self.run = replace(self.run, inputs={**self.run.inputs, **inputs})
        return self.tell()

    def done(self, node: str, *at: int, **fields: Any) -> list[Action]:
        job = self.jobs.pop(ExecutionKey(node, at))
        return self.tell(JobDone(job.key, job.attempt, result(str(job.key), **fields)))

    def failed(self, node: str, *at: int, **fields: Any) -> list[Action]:
        job = self.jobs.pop(ExecutionKey(node, at))
        return self.tell(JobFailed(job.key, job.attempt, "out of paint", **fields))

    def started(self, node: str, *at: int, backend: str = "worker:a") -> list[Action]:
        job = self.jobs[ExecutionKey(node, at)]
        return self.tell(JobStarted(job.key, job.attempt, backend))

    def statuses(self) -> dict[str, str]:
        return {str(key): self.run.record(key).status.value for key in self.run.records}


def simulate(
    simulation: Simulation,
    rng: Random,
    outcome: Callable[[StartJob], Event],
    answer: Callable[[ExecutionKey, int], QuestionAnswered],
    steps_max: int = 20_000,
) -> Simulation:
    """Ends jobs and answers questions in random order, a few at a time, until nothing is left."""
    simulation.start()
    for _ in range(steps_max):
        events = list(_some(simulation, rng, outcome, answer))
        if not events:
            return simulation
        simulation.tell(*events)
    raise AssertionError("it doesn't come to an end")


def _some(
    simulation: Simulation,
    rng: Random,
    outcome: Callable[[StartJob], Event],
    answer: Callable[[ExecutionKey, int], QuestionAnswered],
) -> Iterable[Event]:
    open_keys: list[tuple[str, ExecutionKey]] = [
        *(("job", key) for key in simulation.jobs),
        *(("stop", key) for key in simulation.stopping),
        *(
            ("ask", key)
            for key in simulation.asked
            if simulation.run.status != GraphRunStatus.FAILED
        ),
    ]
    rng.shuffle(open_keys)
    for kind, key in open_keys[: rng.randint(1, 3)]:
        if kind == "job":
            yield outcome(simulation.jobs.pop(key))
        elif kind == "stop":
            job = simulation.stopping.pop(key)
            yield outcome(job) if rng.random() < 0.3 else JobCancelled(key, job.attempt)
        else:
            simulation.asked.remove(key)
            yield answer(key, simulation.questions[key])


def failures(actions: Iterable[Action]) -> list[FailRun]:
    return [each for each in actions if isinstance(each, FailRun)]


def started(actions: Iterable[Action]) -> list[str]:
    return [str(each.key) for each in actions if isinstance(each, StartJob)]


def choose(key: ExecutionKey, backend: str = "worker:b") -> QuestionAnswered:
    return QuestionAnswered(key, Choice.BACKEND, backend)
