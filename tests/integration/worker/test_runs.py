"""One worker, one engine: jobs from lease to result."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from tests.support.backends.prompts import new_color, node
from tests.support.workers.memory_plane import Dispatch, JobFile, Plane, eventually
from tests.support.workers.prompts import failing, passing, picture, steps, video
from tests.support.workers.workers import running_worker, settings_for

from comfyfleet.api.worker import object_info_hash
from comfyfleet.comfy.backend import comfyui_variables
from comfyfleet.engine.serve import Served as Engine
from comfyfleet.worker import heartbeat

PNG_HEAD = b"\x89PNG"


class Fixture:
    """A worker's surroundings; `run` is one job from beginning to end."""

    def __init__(self, plane: Plane, engine: Engine, state: Path) -> None:
        self.plane, self.engine, self.state = plane, engine, state

    async def run(self, prompt: dict[str, Any], *, watched: bool = False, **more: Any) -> Dispatch:
        job = self.plane.add(prompt, **more)
        job.watched = watched
        async with running_worker(settings_for(self.plane, self.engine.url, self.state)):
            await eventually(lambda: job.word)
        return job


@pytest.fixture
def here(plane: Plane, engine: Engine, tmp_path: Path) -> Fixture:
    plane.requeues_again = False
    return Fixture(plane, engine, tmp_path)


async def test_a_picture_is_made_and_delivered(here: Fixture) -> None:
    job = await here.run(picture())
    (output,) = job.result.outputs
    data = here.plane.delivered(job)
    assert data.startswith(PNG_HEAD)
    assert (output.name, output.size, output.content_type) == ("output", len(data), "image/png")
    assert output.content_hash == blake3(data).hexdigest()
    assert (output.node_id, output.kind) == ("9", "images")
    assert (output.filename or "").startswith("made_")
    assert job.result.execution_seconds is not None


async def test_a_video_is_a_video(here: Fixture) -> None:
    job = await here.run(video())
    assert job.result.outputs[0].content_type == "video/mp4"
    assert here.plane.delivered(job)[4:8] == b"ftyp"


@pytest.mark.parametrize("where", [{"binding": "1.file"}, {"placeholder": "{{input}}"}])
async def test_an_input_goes_in_and_comes_out_again(here: Fixture, where: dict[str, str]) -> None:
    data = b"some bytes" * 1000
    job = await here.run(passing(), files={"input": JobFile(data, "my file.bin", **where)})
    assert here.plane.delivered(job) == data
    assert here.plane.stored_types[f"{job.token}/output"] == "application/octet-stream"


async def test_all_files_are_delivered_and_those_of_the_output_node_alone_if_one_is_named(
    here: Fixture,
) -> None:
    prompt = picture()
    prompt["8"] = node("SaveImage", images=["1", 0], filename_prefix="other")
    every = await here.run(prompt)
    one = await here.run({**prompt, "1": picture()["1"]}, output_node_id="8")
    assert {output.node_id for output in every.result.outputs} == {"8", "9"}
    assert len({output.name for output in every.result.outputs}) == 2
    assert all(here.plane.delivered(every, number).startswith(PNG_HEAD) for number in (0, 1))
    assert [output.node_id for output in one.result.outputs] == ["8"]


async def test_previews_are_delivered_only_if_there_is_nothing_else(here: Fixture) -> None:
    preview = node("PreviewImage", images=["1", 0])
    both = await here.run({**picture(), "5": preview})
    alone = await here.run({"1": picture()["1"], "5": preview})
    assert [output.node_id for output in both.result.outputs] == ["9"]
    assert [output.node_id for output in alone.result.outputs] == ["5"]


async def test_texts_that_nodes_show_are_told(here: Fixture) -> None:
    value = new_color()
    prompt = {"1": node("PrimitiveInt", value=value), "2": node("PreviewAny", source=["1", 0])}
    job = await here.run(prompt, output_node_id="2")
    assert job.result.outputs == ()
    assert [each.model_dump() for each in job.result.values] == [
        {"node_id": "2", "name": "text", "value": str(value)}
    ]


async def test_a_failed_node_fails_the_job_with_what_it_said(here: Fixture) -> None:
    job = await here.run(failing("it was the cat"))
    assert "it was the cat" in job.failure["exception_message"]
    assert (job.failure["node_id"], job.failure["node_type"]) == ("1", "ComfyfleetFail")
    assert job.failure["traceback"]


async def test_a_refused_prompt_fails_the_job(here: Fixture) -> None:
    prompt = picture()
    prompt["1"]["inputs"]["width"] = -5
    job = await here.run(prompt)
    assert job.failure["code"] == "prompt_refused"
    assert "width" in job.failure["exception_message"]


async def test_a_run_longer_than_its_limit_is_cancelled_and_fails(here: Fixture) -> None:
    job = await here.run(steps(1000, 50), run_limit_seconds=1)
    assert job.failure["code"] == "run_limit"
    assert here.engine.engine.queue.listed() == ([], [])


async def test_the_limit_of_whole_jobs_counts_where_it_is_shorter(here: Fixture) -> None:
    settings = settings_for(here.plane, here.engine.url, here.state)
    limited = settings.with_variables(comfyui_variables({"COMFYUI_TIMEOUT": "1"}))
    job = here.plane.add(steps(1000, 50), run_limit_seconds=3600)
    async with running_worker(limited):
        await eventually(lambda: job.word)
    assert job.failure["code"] == "run_limit"
    assert "limit of 1 s" in str(job.failure)


async def test_an_output_that_is_too_large_is_a_clear_failure(here: Fixture) -> None:
    job = await here.run(picture(), max_output_bytes=10)
    assert job.failure["code"] == "limit_exceeded"
    assert "The limit is 10 bytes" in job.failure["exception_message"]


async def test_an_input_that_is_no_longer_there_is_a_clear_failure(here: Fixture) -> None:
    job = here.plane.add(passing(), files={"input": JobFile(b"x", binding="1.file")})
    here.plane.gone = True
    async with running_worker(settings_for(here.plane, here.engine.url, here.state)):
        await eventually(lambda: job.word)
    assert job.failure["code"] == "invalid_input"
    assert "'input'" in job.failure["exception_message"]


async def test_nothing_stays_on_disk_after_a_job_however_it_ended(here: Fixture) -> None:
    file = {"input": JobFile(b"x" * 1000, binding="1.file")}
    await here.run(passing(), files=file)
    await here.run(passing(), files=file, max_output_bytes=1)
    await here.run(failing())
    assert list((here.state / "scratch").rglob("*")) == []
    assert list((here.state / "leases").rglob("*")) == []


async def test_progress_is_told_twice_a_second_at_most(here: Fixture) -> None:
    job = await here.run(steps(40, 50))
    percents = [beat.progress.percent or 0 for beat in job.heartbeats if beat.progress]
    waits = [
        after - before
        for before, after in zip(job.heartbeat_times[1:], job.heartbeat_times[2:], strict=False)
    ]
    assert percents == sorted(percents)
    assert any(10 < percent < 90 for percent in percents)
    assert any(beat.progress.steps == 40 for beat in job.heartbeats if beat.progress)
    assert waits
    assert min(waits) > 0.45


@pytest.mark.parametrize("watched", [True, False])
async def test_previews_are_sent_while_somebody_looks(here: Fixture, watched: bool) -> None:
    prompt = steps(20, 50)
    prompt["2"]["inputs"]["previews"] = True
    job = await here.run(prompt, watched=watched)
    previews = [beat.preview for beat in job.heartbeats if beat.preview]
    assert bool(previews) is watched
    for each in previews:
        assert (each.node_id, each.content_type) == ("2", "image/jpeg")
        assert base64.b64decode(each.base64).startswith(b"\xff\xd8")
    assert all(beat.progress.preview is None for beat in job.heartbeats if beat.progress)


async def test_registering_tells_what_the_backend_is_and_has(here: Fixture) -> None:
    await here.run(picture())
    (registered,) = here.plane.registers
    facts = registered.backend
    assert facts is not None
    assert facts.kind == "comfyfleet engine"
    assert "SaveImage" in facts.node_types
    assert here.plane.object_info is not None
    assert object_info_hash(json.loads(here.plane.object_info)) == facts.object_info_hash


async def test_polls_tell_which_models_are_loaded(here: Fixture) -> None:
    await here.run(picture(), model_key="flux", model_set="abc")
    assert here.plane.polls[-1].models_loaded == ("flux",)
    assert here.plane.polls[-1].model_set == "abc"


async def test_what_was_put_into_the_prompt_is_told_once(
    here: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "START_SECONDS", 60.0)  # the run ends before
    job = await here.run(passing(), files={"input": JobFile(b"x" * 1000, binding="1.file")})
    told = [beat.filled_in for beat in job.heartbeats] + [job.result.filled_in]
    (filled_in,) = [each for each in told if each is not None]
    assert filled_in["1"]["file"]


async def test_what_was_put_into_the_prompt_is_told_with_its_start(
    here: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "PROGRESS_SECONDS_MIN", 60.0)
    monkeypatch.setattr(heartbeat, "START_SECONDS", 0.0)
    job = await here.run(steps(4, 50))
    (only,) = job.heartbeats
    assert only.started
    assert only.filled_in is not None


async def test_a_worker_tells_which_runs_had_to_switch_models(here: Fixture) -> None:
    models = ("flux", "flux", "sdxl", "flux", None)
    jobs = [here.plane.add(picture(), model_key=model) for model in models]
    async with running_worker(settings_for(here.plane, here.engine.url, here.state)):
        await eventually(lambda: all(job.word for job in jobs))
    told = [job.result.model_change for job in jobs]
    assert told == ["first", "same", "first", "switched", None]
