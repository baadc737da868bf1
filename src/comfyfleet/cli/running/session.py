"""One run from its files to its outputs, on any backend."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comfyfleet.cli.running.inputs import Upload, with_names
from comfyfleet.cli.running.naming import equal_before, readable_folder, readable_name, reserve
from comfyfleet.cli.running.progress import Plan, advance, begin, plan_of
from comfyfleet.cli.running.reporting import Reporter
from comfyfleet.cli.running.targets import Target
from comfyfleet.cli.world import World
from comfyfleet.comfy import Backend, Cancellation, OutputFile, OutputValue
from comfyfleet.comfy.events import Cancelled, End, Failed, Succeeded
from comfyfleet.kernel.errors import (
    FileGone,
    FleetError,
    InvalidInput,
    OutcomeUnknown,
    PromptRefused,
    RunFailed,
    RunLost,
    RunStalled,
    RunTimedOut,
    UnexpectedAnswer,
)
from comfyfleet.workflow.model import Prompt
from comfyfleet.workflow.setting import ExposedInput

# How it ended is known: there is nothing to go back to.
SETTLED = (RunFailed, PromptRefused, RunLost)


@dataclass(frozen=True, slots=True)
class Work:
    """A prompt and what it needs; `workflow` is written into the pictures, as the editor does."""

    prompt: Prompt
    uploads: tuple[Upload, ...]
    object_info: Mapping[str, Any]
    workflow: Mapping[str, Any] | None
    exposed: tuple[ExposedInput, ...] = ()  # what its subgraphs show, for values set later


@dataclass(frozen=True, slots=True)
class Made:
    """What came out. `skipped` are previews, left on the server because there are real outputs."""

    paths: tuple[Path, ...]
    values: tuple[OutputValue, ...]
    seconds: float
    skipped: int = 0


class Session:
    """Runs on one backend, told to one reporter."""

    def __init__(
        self, backend: Backend, target: Target, reporter: Reporter, folder: Path, world: World
    ) -> None:
        self._backend = backend
        self._target = target
        self._reporter = reporter
        self._folder = folder
        self._world = world
        self._names: dict[Path, str] = {}

    async def run(self, work: Work) -> Made:
        """Raises CancelledError once the run is cancelled on the backend, too."""
        prompt = await self._hand_in(work)
        prompt_id, run_id = self._world.new_id(), None
        try:
            run_id = await self._submit(work, prompt, prompt_id)
            return await self.finish(run_id, plan_of(prompt, work.object_info))
        except asyncio.CancelledError:
            # In a flow of its own: this one is being cancelled.
            await asyncio.create_task(self._cancel(prompt_id, run_id))
            raise
        except FleetError as error:
            raise self._with_way_back(error, prompt_id, run_id) from error

    async def leave(self, work: Work) -> str:
        """Submit it and let it go on alone."""
        return await self._submit(work, await self._hand_in(work), self._world.new_id())

    async def finish(self, run_id: str, plan: Plan, *, again: bool = False) -> Made:
        """`again`: its results may have been saved before; a file that is there is not saved twice."""
        began = self._world.clock()
        await self._follow(run_id, plan)
        outputs = await self._backend.outputs(run_id)
        kept = [file for file in outputs.files if file.folder != "temp"]
        files = kept or list(outputs.files)
        names = names_of(files, plan)
        paths = [await self._save(file, names.get(file.node_id), again) for file in files]
        for value in outputs.values:
            self._reporter.shown(value)
        seconds = self._world.clock() - began
        skipped = len(outputs.files) - len(files)
        return Made(tuple(path for path in paths if path), outputs.values, seconds, skipped)

    async def _hand_in(self, work: Work) -> Prompt:
        names = [(upload, await self._upload(upload.path)) for upload in work.uploads]
        return with_names(work.prompt, work.object_info, names) if names else work.prompt

    async def _upload(self, path: Path) -> str:
        """Once for all rows of a batch."""
        if path not in self._names:
            self._names[path] = (await self._backend.upload(path)).value
            self._reporter.uploaded(path, self._names[path])
        return self._names[path]

    async def _submit(self, work: Work, prompt: Prompt, prompt_id: str) -> str:
        pictures = {"extra_pnginfo": {"workflow": work.workflow}} if work.workflow else None
        submitted = await self._backend.submit(prompt, prompt_id=prompt_id, extra_data=pictures)
        self._reporter.submitted(submitted.run_id, self._target.name)
        return submitted.run_id

    async def _follow(self, run_id: str, plan: Plan) -> None:
        standing, end = begin(plan, self._world.clock()), None
        async for event in self._backend.follow(run_id):
            standing = advance(standing, event, self._world.clock())
            self._reporter.heard(event, standing)
            end = event if isinstance(event, End) else end
        check_end(end, plan, run_id)

    async def _save(self, file: OutputFile, node_name: str | None, again: bool) -> Path | None:
        folder = self._folder / readable_folder("" if file.folder == "temp" else file.subfolder)
        name = readable_name(file.filename, node_name=node_name)
        path = reserve(folder, name)
        try:
            await self._backend.fetch(file, path)
        except FileGone as error:
            path.unlink(missing_ok=True)
            self._world.warn(error.message)
            return None
        except OSError as error:
            path.unlink(missing_ok=True)
            raise InvalidInput(f"{path} can't be written: {error.strerror}") from error
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        if again and (before := equal_before(path, name)):
            path.unlink()
            path = before
        self._reporter.saved(path, file.node_id)
        return path

    async def _cancel(self, prompt_id: str, run_id: str | None) -> None:
        """Without a run's id it may have been submitted or not: the backend is asked."""
        place = self._target.name
        try:
            found = None if run_id else await self._backend.adopt(prompt_id)
            run_id = run_id or (found.run_id if found else prompt_id)
            outcome = await self._backend.cancel(run_id)
        except FleetError as error:
            self._world.warn(f"whether it was cancelled on {place} is not certain: {error.message}")
            return
        self._world.say(
            {
                Cancellation.CANCELLED: f"cancelled on {place}: run {run_id}",
                Cancellation.ENDED_BEFORE: f"run {run_id} had ended on {place} before it could be cancelled",
                Cancellation.NOT_FOUND: f"interrupted; {place} has no such run",
            }[outcome]
        )

    def _with_way_back(self, error: FleetError, prompt_id: str, run_id: str | None) -> FleetError:
        may_go_on = run_id is not None or isinstance(error, OutcomeUnknown)
        if isinstance(error, SETTLED) or not may_go_on:
            return error
        if self._target.options is None:
            if not isinstance(error, RunStalled | RunTimedOut):
                return error
            hint = "--timeout SECONDS allows more time."
        else:
            found = run_id or prompt_id
            hint = f"Look after it with: comfyfleet watch {found} {self._target.options}"
        return type(error)(error.message, **{**error.details, "hint": hint})


def names_of(files: Sequence[OutputFile], plan: Plan) -> dict[str, str]:
    """Of the nodes that made them; those of equal titles are told apart by their ids."""
    titles = {
        each.node_id: plan.names[each.node_id] for each in files if each.node_id in plan.names
    }
    counts = Counter(titles.values())
    return {
        node_id: title if counts[title] == 1 else f"{title} node {node_id}"
        for node_id, title in titles.items()
    }


def check_end(end: End | None, plan: Plan, run_id: str) -> None:
    """Raises RunFailed unless it succeeded."""
    match end:
        case Succeeded():
            return
        case Failed(node_id=node_id, node_type=node_type, message=message):
            raise RunFailed(_failure(plan, node_id, node_type, message), run_id=run_id)
        case Cancelled():
            raise RunFailed("the run was cancelled on the server", run_id=run_id)
    raise UnexpectedAnswer(f"run {run_id} has no end")


def _failure(plan: Plan, node_id: str | None, node_type: str | None, message: str) -> str:
    if node_id is None:
        return f"the run failed: {message}"
    name = plan.names.get(node_id)
    known = f' "{name}"' if name and name != node_type else ""
    kind = f" ({node_type})" if node_type else ""
    return f"node {node_id}{known}{kind} failed: {message.strip()}"
