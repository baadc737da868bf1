"""Plays the world to a run: jobs that end in any order, and people who answer."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from random import Random
from typing import Any
from uuid import UUID

from tests.unit.graphs.builders import CATALOGUE, WORKERS

from comfyfleet.graphs.catalogue import Catalogue
from comfyfleet.graphs.decide import cancel_run, next_actions, retry_run
from comfyfleet.graphs.draft import Advance
from comfyfleet.graphs.events import (
    Action,
    Answer,
    AskUser,
    CancelJob,
    Event,
    FailRun,
    JobCancelled,
    JobDone,
    JobFailed,
    JobStarted,
    StartJob,
    Surroundings,
)
from comfyfleet.graphs.parsing import parse_graph
from comfyfleet.graphs.plan import Plan, plan_of
from comfyfleet.graphs.runs import Choice, Key, Record, Run, RunStatus, Status

RUN_ID = UUID(int=7)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
WORLD = Surroundings(NOW, WORKERS)


def picture(name: str) -> dict[str, Any]:
    return {"file_id": name, "path": f"files/{name}.png", "mime_type": "image/png"}


def result(name: str, **fields: Any) -> dict[str, Any]:
    file = picture(name)
    return {
        "images": [file], "files": [file], "width": 512, "height": 512, "prompt_id": name,
        "execution_time": 1.0, **fields,
    }  # fmt: skip


def plan_for(document: dict[str, Any], catalogue: Catalogue = CATALOGUE) -> Plan:
    parsed = parse_graph(document)
    assert parsed.problems == ()
    return plan_of(parsed.graph, catalogue)


@dataclass
class Simulation:
    """Applies each decision, and checks what must hold after every one of them."""

    plan: Plan
    run: Run = field(default_factory=lambda: Run(RUN_ID))
    world: Surroundings = WORLD
    actions: list[Action] = field(default_factory=list)
    jobs: dict[Key, StartJob] = field(default_factory=dict)  # in flight
    stopping: dict[Key, StartJob] = field(default_factory=dict)
    questions: dict[Key, int] = field(default_factory=dict)  # how often asked
    asked: list[Key] = field(default_factory=list)
    job_ids: set[UUID] = field(default_factory=set)
    ended: dict[Key, Record] = field(default_factory=dict)

    def tell(self, *events: Event) -> list[Action]:
        return self.follow(next_actions(self.plan, self.run, events, self.world))

    def cancel(self) -> list[Action]:
        return self.follow(cancel_run(self.plan, self.run, self.world))

    def retry(self, **how: Any) -> list[Action]:
        self.ended = {
            k: r for k, r in self.ended.items() if r.status in (Status.DONE, Status.SKIPPED)
        }
        return self.follow(retry_run(self.plan, self.run, self.world, **how))

    def follow(self, advance: Advance) -> list[Action]:
        for key in advance.changed:
            record = advance.run.record(key)
            if key in self.ended:
                assert record == self.ended[key], f"{key} ended twice"
            if record.status.is_ended:
                self.ended[key] = record
        self.run = advance.run
        self.actions.extend(advance.actions)
        for action in advance.actions:
            self.carry_out(action)
        assert len(self.jobs) <= self.world.in_queue_max
        assert set(self.jobs) == self.run.in_flight
        return list(advance.actions)

    def carry_out(self, action: Action) -> None:
        match action:
            case StartJob():
                assert action.job_id not in self.job_ids
                assert action.key not in self.jobs
                self.job_ids.add(action.job_id)
                self.jobs[action.key] = action
            case CancelJob() if self.run.record(action.key).status == Status.STOPPING:
                self.stopping[action.key] = self.jobs.pop(action.key)
            case AskUser():
                self.questions[action.key] = self.questions.get(action.key, 0) + 1
                self.asked.append(action.key)

    # One word each, for tests that tell a story

    def start(self, **inputs: Any) -> list[Action]:
        self.run = replace(self.run, inputs={**self.run.inputs, **inputs})
        return self.tell()

    def done(self, node: str, *at: int, **fields: Any) -> list[Action]:
        job = self.jobs.pop(Key(node, at))
        return self.tell(JobDone(job.key, job.attempt, result(str(job.key), **fields)))

    def failed(self, node: str, *at: int, **fields: Any) -> list[Action]:
        job = self.jobs.pop(Key(node, at))
        return self.tell(JobFailed(job.key, job.attempt, "out of paint", **fields))

    def started(self, node: str, *at: int, backend: str = "worker:a") -> list[Action]:
        job = self.jobs[Key(node, at)]
        return self.tell(JobStarted(job.key, job.attempt, backend))

    def statuses(self) -> dict[str, str]:
        return {str(key): self.run.record(key).status.value for key in self.run.records}


def simulate(
    simulation: Simulation,
    rng: Random,
    outcome: Callable[[StartJob], Event],
    answer: Callable[[Key, int], Answer],
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
    answer: Callable[[Key, int], Answer],
) -> Iterable[Event]:
    open_keys: list[tuple[str, Key]] = [
        *(("job", key) for key in simulation.jobs),
        *(("stop", key) for key in simulation.stopping),
        *(("ask", key) for key in simulation.asked if simulation.run.status != RunStatus.FAILED),
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


def choose(key: Key, backend: str = "worker:b") -> Answer:
    return Answer(key, Choice.BACKEND, backend)
