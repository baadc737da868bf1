"""`comfyfleet admin submit`: a job through the one door."""

import json
import mimetypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from comfyfleet.cli.admin.client import USUALLY, Asking, Control, control
from comfyfleet.cli.admin.showing import print_json
from comfyfleet.cli.admin.values import parse_files, parse_values
from comfyfleet.cli.admin.waiting import Waiting
from comfyfleet.cli.running.naming import check_folder, readable_name, reserve
from comfyfleet.cli.world import InWorld, World, counted
from comfyfleet.kernel.errors import RunFailed

WHERE = Group("Where and when", sort_key=2)
RESULTS = Group("Results", sort_key=3)


@Parameter(name="*", group=WHERE)
@dataclass(frozen=True)
class Placing:
    tenant: Annotated[
        str | None, Parameter(metavar="ID", help="Whose job it is; else the tenant `default`.")
    ] = None
    version: Annotated[int | None, Parameter(help="Of the workflow; else the active one.")] = None
    priority: Annotated[int, Parameter(help="Higher goes first.", allow_leading_hyphen=True)] = 0
    stage: Annotated[str, Parameter(help="Of the fleets that may run it.")] = "production"
    provider: Annotated[Literal["self_hosted", "cloud"], Parameter(help="The kind of backend.")] = (
        "self_hosted"
    )
    affinity: Annotated[
        str | None,
        Parameter(metavar="WHO", help="Only there: worker:ID or fleet:SLUG/STAGE."),
    ] = None


@Parameter(name="*", group=RESULTS)
@dataclass(frozen=True)
class Following:
    wait: Annotated[bool, Parameter(help="Wait until all have ended, and tell how.")] = False
    output_dir: Annotated[
        Path | None,
        Parameter(
            name=["--output-dir", "-o"],
            metavar="DIR",
            help="Save the results there (and wait for them). Nothing is overwritten.",
        ),
    ] = None

    @property
    def waits(self) -> bool:
        return self.wait or self.output_dir is not None


ANYWHERE, NOT_FOLLOWED = Placing(), Following()


def submit(
    workflow: Annotated[str, Parameter(help="The slug of a registered workflow.")],
    /,
    *,
    set_: Annotated[
        tuple[str, ...],
        Parameter(
            name="--set",
            metavar="NAME=VALUE",
            help="A property's value. Repeatable.",
            allow_leading_hyphen=True,
        ),
    ] = (),
    file: Annotated[
        tuple[str, ...],
        Parameter(metavar="NAME=PATH", help="A file for an image, video or audio. Repeatable."),
    ] = (),
    count: Annotated[int, Parameter(help="So many jobs; seeds that are not set differ.")] = 1,
    placing: Placing = ANYWHERE,
    following: Following = NOT_FOLLOWED,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Submit a job, or many. The ids go to stdout.

    ```
    comfyfleet admin submit cat --set prompt="a cat" --file input=cat.png --wait
    ```
    """
    if following.output_dir:
        check_folder(following.output_dir)
    with control(asking, world) as plane:
        errand = _Errand(plane, placing, following, asking, world)
        errand.run(workflow, set_, file, count)


@dataclass(frozen=True)
class _Errand:
    plane: Control
    placing: Placing
    following: Following
    asking: Asking
    world: World

    def run(self, slug: str, texts: Sequence[str], files: Sequence[str], count: int) -> None:
        properties = self.plane.get("workflows", slug)["properties"]
        values = parse_values(texts, properties, slug)
        uploads = parse_files(files, properties, slug)
        ids = self._submitted(slug, values, uploads, count)
        if not self.following.waits:
            self._tell_ids(ids, slug)
            return
        try:
            jobs = Waiting(self.plane, self.world, self.placing.tenant).wait(ids)
        except KeyboardInterrupt:
            self._tell_ids(ids, slug)  # they go on, and are found again by these
            raise
        saved = self._saved(jobs)
        if self.asking.as_json:
            print_json({"jobs": jobs, "saved": saved}, self.world)
        else:
            self._tell(jobs, saved)
        _check(jobs)

    def _submitted(
        self, slug: str, values: Mapping[str, Any], files: Mapping[str, Path], count: int
    ) -> list[str]:
        placing = self.placing
        body: dict[str, Any] = {
            "workflow_slug": slug,
            "properties": values,
            "files": {name: self._uploaded(path) for name, path in files.items()},
            "priority": placing.priority,
            "stage": placing.stage,
            "provider": placing.provider,
            "count": count,
            "tenant_id": placing.tenant,
            "version": placing.version,
            "backend_affinity": placing.affinity,
        }
        given = {name: value for name, value in body.items() if value is not None}
        answer = self.plane.post("jobs", **given)
        for warning in answer.get("warnings", ()):
            self.world.warn(warning)
        ids: list[str] = answer["ids"]
        return ids

    def _uploaded(self, path: Path) -> str:
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        owner = {"tenant_id": self.placing.tenant} if self.placing.tenant else {}
        slot = self.plane.post(
            "uploads",
            filename=path.name,
            content_type=kind,
            size=path.stat().st_size,
            **owner,
        )
        self.plane.upload(slot["upload"], path)
        file_id: str = slot["file_id"]
        return file_id

    def _saved(self, jobs: Sequence[Mapping[str, Any]]) -> list[str]:
        folder = self.following.output_dir
        if folder is None:
            return []
        saved = []
        for output in (each for job in jobs for each in job.get("outputs", ())):
            path = reserve(folder, readable_name(output["filename"]))
            self.plane.download(output["url"], path)
            saved.append(str(path))
        return saved

    def _tell_ids(self, ids: Sequence[str], slug: str) -> None:
        if self.asking.as_json:
            print_json({"ids": ids}, self.world)
            return
        self._lines(ids)
        self.world.say(
            f"{counted(len(ids), 'job', 'jobs')} of {slug} submitted; "
            f"look with: comfyfleet admin jobs show {ids[0]}"
        )

    def _tell(self, jobs: Sequence[Mapping[str, Any]], saved: Sequence[str]) -> None:
        urls = [str(each["url"]) for job in jobs for each in job.get("outputs", ())]
        values = [each["value"] for job in jobs for each in job.get("values", ())]
        self._lines(saved if self.following.output_dir else urls)
        self._lines([each if isinstance(each, str) else json.dumps(each) for each in values])
        good = sum(job["status"] == "completed" for job in jobs)
        files = counted(len(urls), "file", "files")
        if values:
            files += ", " + counted(len(values), "value", "values")
        self.world.say(f"{good} of {counted(len(jobs), 'job', 'jobs')} completed: {files}")

    def _lines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.world.stdout.write(f"{line}\n".encode())
        self.world.stdout.flush()


def _check(jobs: Sequence[Mapping[str, Any]]) -> None:
    """The exit code is that of a failure if one of them has not completed."""
    bad = [job for job in jobs if job["status"] != "completed"]
    if not bad:
        return
    first = bad[0]
    said = first.get("error") or first["status"]
    raise RunFailed(
        f"{len(bad)} of {counted(len(jobs), 'job', 'jobs')} did not complete; job {first['id']}: {said}",
        hint=f"comfyfleet admin jobs show {first['id']}",
    )
