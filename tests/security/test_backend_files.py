"""Tenants that share a backend: nobody reads what another one's job put there."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.backends.nodes import WORD, node_type
from tests.support.backends.prompts import node
from tests.support.workers.memory_plane import Dispatch, JobFile, Plane, eventually
from tests.support.workers.plane_server import serving_plane
from tests.support.workers.prompts import passing, picture
from tests.support.workers.workers import running_worker, settings_for

from comfyfleet.engine import serve_in_thread
from comfyfleet.engine.node import Context, EngineNodeType, NodeResult
from comfyfleet.engine.nodes import registry
from comfyfleet.engine.serve import Served as Engine

PLAYLIST = b"#EXTM3U\n#EXTINF:1,\n../output/video/inverted_00001_.mp4\n"


class Backend:
    def __init__(self, plane: Plane, engine: Engine, state: Path) -> None:
        self.plane, self.engine, self.state = plane, engine, state
        plane.requeues_again = False
        self.root = engine.engine.folders.output.parent

    async def run(self, *jobs: dict[str, Any], clean: bool = False) -> list[Dispatch]:
        made = [self.plane.add(**job) for job in jobs]
        home = self.root if clean else None
        settings = settings_for(self.plane, self.engine.url, self.state, backend_folder=home)
        async with running_worker(settings):
            await eventually(lambda: all(each.word for each in made))
        return made

    def files(self, folder: str) -> list[Path]:
        found = self.root / folder
        return [path.relative_to(found) for path in found.rglob("*") if path.is_file()]


@pytest.fixture
def backend(tmp_path: Path) -> Any:
    with serving_plane() as served, serve_in_thread(data=tmp_path / "engine") as engine:
        yield Backend(served.plane, engine, tmp_path / "state")


async def test_inputs_and_outputs_lie_in_a_folder_that_cannot_be_guessed(backend: Backend) -> None:
    job = {"prompt": passing(), "files": {"input": JobFile(PLAYLIST, "x.m3u8", "1.file")}}
    first, second = await backend.run(job, job)
    inputs, outputs = backend.files("input"), backend.files("output")
    assert {path.suffix for path in inputs} == {".dat"}
    assert all(len(path.parts) == 3 and path.parts[0] == "comfyfleet" for path in inputs)
    assert len({path.parts[1] for path in inputs}) == 2
    assert {path.parts[1] for path in outputs} == {path.parts[1] for path in inputs}
    # The control plane stores the inputs that were filled in, and shows them to operators only.
    reports = [each for job in (first, second) for each in job.words]
    told = "".join(each.model_dump_json(exclude={"filled_in"}) for each in reports)
    assert not any(path.parts[1] in told for path in outputs)


async def test_the_delivered_name_keeps_its_readable_end(backend: Backend) -> None:
    prompt = picture()
    prompt["9"]["inputs"]["filename_prefix"] = "../../pictures/cat"
    (job,) = await backend.run({"prompt": prompt})
    assert job.result.outputs[0].filename == "cat_00001_.png"
    (path,) = backend.files("output")
    assert path.parts[0] == "comfyfleet"
    assert path.parts[2:] == ("pictures", "cat_00001_.png")


@pytest.mark.parametrize(
    "name", ["made_00001_.png [output]", "made_00001_.png", "../output/made_00001_.png", "x [temp]"]
)
async def test_a_text_that_names_another_file_is_refused_before_it_runs(
    backend: Backend, name: str
) -> None:
    output = backend.root / "output"
    output.mkdir(parents=True, exist_ok=True)
    (output / "made_00001_.png").write_bytes(b"of another tenant")
    stolen = {"1": node("ComfyfleetPassFile", file=name, filename_prefix="mine")}
    (job,) = await backend.run({"prompt": stolen})
    assert job.failure["code"] == "invalid_input"
    assert "doesn't belong to this job" in job.failure["exception_message"]
    assert not job.started


async def test_a_file_that_the_operator_put_there_for_all_may_be_named(backend: Backend) -> None:
    folder = backend.root / "input"
    folder.mkdir(parents=True, exist_ok=True)
    prompt = {"1": node("ComfyfleetPassFile", file="logo.bin", filename_prefix="mine")}
    backend.plane.add(picture())
    (folder / "logo.bin").write_bytes(b"logo")
    (job,) = await backend.run({"prompt": prompt})
    assert backend.plane.delivered(job) == b"logo"


async def test_nothing_of_a_job_stays_where_the_worker_can_reach_it(backend: Backend) -> None:
    given = {"input": JobFile(b"secret", "x.bin", "1.file")}
    failing = {"1": passing()["1"], "2": node("ComfyfleetFail", fail=True, after_ms=0, message="")}
    done, failed = await backend.run(
        {"prompt": passing(), "files": given}, {"prompt": failing, "files": given}, clean=True
    )
    assert backend.plane.delivered(done) == b"secret"
    assert failed.failure
    assert backend.files("input") == backend.files("output") == []


def naming(subfolder: str) -> EngineNodeType:
    """A node whose result names a file in a folder of its choice, as a custom node can."""

    def run(_: Context, **inputs: Any) -> NodeResult:
        file = {"filename": "made_00001_.png", "subfolder": subfolder, "type": "output"}
        return NodeResult((), ui={"images": [file]})

    return node_type("NamesFile", run, {"word": WORD}, outputs=(), output_node=True)


@pytest.mark.parametrize(
    ("subfolder", "is_fetched"),
    [
        ("comfyfleet/of-another-job", False),
        ("COMFYFLEET\\of-another-job", False),
        ("./comfyfleet/of-another-job", False),
        ("x/../comfyfleet/of-another-job", False),
        ("../../secrets", False),
        ("/etc", False),
        ("C:\\secrets", False),
        ("renders", True),
        ("", True),
    ],
)
async def test_a_result_in_a_folder_of_another_job_is_not_fetched(
    tmp_path: Path, subfolder: str, is_fetched: bool
) -> None:
    nodes = {**registry(), "NamesFile": naming(subfolder)}
    with (
        serving_plane() as served,
        serve_in_thread(data=tmp_path / "engine", nodes=nodes) as engine,
    ):
        backend = Backend(served.plane, engine, tmp_path / "state")
        for folder in ("comfyfleet/of-another-job", "renders", ""):
            place = backend.root / "output" / folder
            place.mkdir(parents=True, exist_ok=True)
            (place / "made_00001_.png").write_bytes(b"a file")
        (job,) = await backend.run({"prompt": {"1": node("NamesFile", word="")}})
    if is_fetched:
        assert served.plane.delivered(job) == b"a file"
    else:
        assert job.failure["code"] == "invalid_input"
        assert "isn't in a folder of this job" in job.failure["exception_message"]
