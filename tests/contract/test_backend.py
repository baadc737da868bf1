"""What every backend does alike. Against a real ComfyUI, too, when COMFYUI_URL names one."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.stages import (
    Stage,
    StageOf,
    cloud_v1_stage,
    cloud_v2_stage,
    engine_stage,
    gateway_stage,
    gateway_v2_stage,
    server_stage,
)
from tests.support.backends.prompts import kinds, new_color, new_id, node, picture, run
from tests.support.server.gateway import GatewayProcess, serving_engines, up_with_engines

from comfyfleet.comfy import Backend, Cancellation
from comfyfleet.comfy.events import (
    Cached,
    Cancelled,
    Failed,
    NodeStarted,
    Progress,
    Queued,
    Started,
    Succeeded,
)
from comfyfleet.errors import FileGone, NotOffered, PromptRefused, RunLost

COMFYUI_URL = os.environ.get("COMFYUI_URL")
STAGES: dict[str, StageOf] = {
    "engine": engine_stage,
    "cloud-v1": cloud_v1_stage,
    "cloud-v2": cloud_v2_stage,
}
if COMFYUI_URL:
    STAGES["comfyui"] = lambda: server_stage(str(COMFYUI_URL))
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d494844520000000100000001080200000090"
    "7753de0000000c4944415408d763f8cfc000000301010018dd8db00000000049454e44ae426082"
)


# These stand on one gateway, each test with a user of its own.
GATEWAY_STAGES = {"gateway": gateway_stage, "gateway-v2": gateway_v2_stage}


@pytest.fixture(scope="session")
def gateway_of_one_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    with serving_engines(1, folder) as engines, up_with_engines(folder, engines) as server:
        yield server


@pytest.fixture(params=[*STAGES, *GATEWAY_STAGES])
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    if request.param in GATEWAY_STAGES:
        server = request.getfixturevalue("gateway_of_one_engine")
        async with GATEWAY_STAGES[request.param](server) as stage:
            yield stage
    else:
        async with STAGES[request.param]() as stage:
            yield stage


# What a gateway does otherwise on purpose; docs/reference/gateway-differences.md has the reasons.
OTHERWISE = {
    "a_cached_run_succeeds_and_says_so": "each prompt saves files of its own",
    "after_free_nothing_is_kept": "a fleet's memory is not one client's to free",
    "progress_counts_up_to_the_total": "previews go to clients that ask for them",
}


@pytest.fixture(autouse=True)
def skip_what_is_otherwise(request: pytest.FixtureRequest) -> None:
    name = request.node.originalname.removeprefix("test_")
    if request.node.name.endswith("[gateway]") and name in OTHERWISE:
        pytest.skip(OTHERWISE[name])


def needs(stage: Stage, ability: str) -> None:
    if not getattr(stage.abilities, ability):
        pytest.skip(f"the backend says that it lacks this: {ability}")


@pytest.fixture
def backend(stage: Stage) -> Backend:
    return stage.backend


async def test_it_describes_itself(stage: Stage, backend: Backend) -> None:
    if not stage.abilities.describes:
        with pytest.raises(NotOffered):
            await backend.describe()
        return
    description = await backend.describe()
    assert description.object_info["SaveImage"]["output_node"] is True
    assert description.version
    assert description.devices


async def test_an_idle_backend_has_an_empty_queue(backend: Backend) -> None:
    assert await backend.queue_length() == 0


async def test_a_run_succeeds_and_its_file_can_be_fetched(backend: Backend, tmp_path: Path) -> None:
    run_id, events = await run(backend, picture(new_color(), size=24))
    outputs = await backend.outputs(run_id)
    assert events[-1] == Succeeded(run_id)
    assert [(file.node_id, file.key, file.folder) for file in outputs.files] == [
        ("9", "images", "output")
    ]
    fetched = await backend.fetch(outputs.files[0], tmp_path / "deep" / "x.png")
    data = fetched.path.read_bytes()
    assert data.startswith(PNG[:8])
    assert (fetched.size_bytes, fetched.content_type) == (len(data), "image/png")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.png"]


async def test_events_come_in_order_and_end_once(stage: Stage, backend: Backend) -> None:
    needs(stage, "reports_nodes")
    run_id, events = await run(backend, picture(new_color()))
    assert kinds(events) == [
        "Queued",
        "Started",
        "Cached",
        "NodeStarted",
        "NodeDone",
        "NodeStarted",
        "NodeDone",
        "Succeeded",
    ]
    started = [event.node_id for event in events if isinstance(event, NodeStarted)]
    assert started == ["1", "9"]
    assert {event.run_id for event in events} == {run_id}


async def test_a_cached_run_succeeds_and_says_so(stage: Stage, backend: Backend) -> None:
    needs(stage, "reports_nodes")
    prompt = picture(new_color())
    first, _ = await run(backend, prompt)
    second, events = await run(backend, prompt)
    before, after = await backend.outputs(first), await backend.outputs(second)
    assert Cached(second, ("1", "9")) in events
    assert events[-1] == Succeeded(second, reused=("1", "9"))
    assert (before.reused, after.reused) == ((), ("1", "9"))
    assert [file.reused for file in (*before.files, *after.files)] == [False, True]
    assert before.files[0].filename == after.files[0].filename


async def test_texts_are_outputs_too(stage: Stage, backend: Backend) -> None:
    needs(stage, "returns_texts")
    color = new_color()
    run_id, _ = await run(
        backend,
        {
            "1": node("PrimitiveInt", value=color),
            "2": node("PreviewAny", source=["1", 0]),
        },
    )
    outputs = await backend.outputs(run_id)
    assert [(each.node_id, each.key, each.value) for each in outputs.values] == [
        ("2", "text", str(color))
    ]


async def test_temporary_files_can_be_fetched(
    stage: Stage, backend: Backend, tmp_path: Path
) -> None:
    needs(stage, "reports_folders")
    prompt = picture(new_color())
    prompt["9"] = node("PreviewImage", images=["1", 0])
    run_id, _ = await run(backend, prompt)
    file = (await backend.outputs(run_id)).files[0]
    assert file.folder == "temp"
    assert (await backend.fetch(file, tmp_path / "p.png")).size_bytes > 0


async def test_a_refusal_names_node_title_input_and_values(backend: Backend) -> None:
    prompt = picture(0)
    prompt["1"]["inputs"]["width"] = 0
    prompt["1"]["_meta"] = {"title": "My canvas"}
    with pytest.raises(PromptRefused) as caught:
        await backend.submit(prompt, prompt_id=new_id())
    (problem,) = caught.value.details["problems"]
    assert (problem.node_id, problem.title, problem.class_type) == ("1", "My canvas", "EmptyImage")
    assert (problem.kind, problem.input_name, problem.received) == (
        "value_smaller_than_min",
        "width",
        0,
    )
    assert problem.message == "Value 0 smaller than min of 1"
    assert "at least 1" in problem.allowed
    assert "node 1 (My canvas), input width" in caught.value.message


async def test_a_refused_choice_shows_what_is_allowed(backend: Backend) -> None:
    prompt = picture(new_color())
    prompt["5"] = node(
        "ImageScale", image=["1", 0], upscale_method="magic", width=8, height=8, crop="disabled"
    )
    prompt["9"]["inputs"]["images"] = ["5", 0]
    with pytest.raises(PromptRefused) as caught:
        await backend.submit(prompt, prompt_id=new_id())
    (problem,) = caught.value.details["problems"]
    assert (problem.input_name, problem.received) == ("upscale_method", "magic")
    assert "lanczos" in problem.allowed


@pytest.mark.parametrize(
    ("change", "kind", "message", "details", "input_name"),
    [
        (
            {"width": 0},
            "value_smaller_than_min",
            "Value 0 smaller than min of 1",
            "width",
            "width",
        ),
        (
            {"width": 99999},
            "value_bigger_than_max",
            "Value 99999 bigger than max of 16384",
            "width",
            "width",
        ),
        (
            {"width": "wide"},
            "invalid_input_type",
            "Failed to convert an input value to a INT value",
            "width, wide, invalid literal for int() with base 10: 'wide'",
            "width",
        ),
        (
            {"width": None},
            "invalid_input_type",
            "Failed to convert an input value to a INT value",
            "width, None, int() argument must be a string, a bytes-like object "
            "or a real number, not 'NoneType'",
            "width",
        ),
        (
            {"width": ["1"]},
            "bad_linked_input",
            "Bad linked input, must be a length-2 list of [node_id, slot_index]",
            "width",
            "width",
        ),
        (
            {"width": ["1", 0]},
            "return_type_mismatch",
            "Return type mismatch between linked nodes",
            "width, received_type(IMAGE) mismatch input_type(INT)",
            "width",
        ),
    ],
)
async def test_a_refusal_keeps_the_words_of_comfyui(
    backend: Backend, change: dict[str, Any], kind: str, message: str, details: str, input_name: str
) -> None:
    prompt = picture(new_color())
    prompt["5"] = {**prompt["1"], "inputs": {**prompt["1"]["inputs"], **change}}
    prompt["9"]["inputs"]["images"] = ["5", 0]
    with pytest.raises(PromptRefused) as caught:
        await backend.submit(prompt, prompt_id=new_id())
    (problem,) = caught.value.details["problems"]
    assert (problem.node_id, problem.kind, problem.message) == ("5", kind, message)
    assert (problem.details, problem.input_name) == (details, input_name)


async def test_a_missing_input_is_told_in_the_words_of_comfyui(backend: Backend) -> None:
    prompt = picture(new_color())
    del prompt["1"]["inputs"]["height"]
    with pytest.raises(PromptRefused) as caught:
        await backend.submit(prompt, prompt_id=new_id())
    (problem,) = caught.value.details["problems"]
    assert (problem.kind, problem.message, problem.details) == (
        "required_input_missing",
        "Required input is missing",
        "height",
    )


async def test_a_prompt_without_outputs_is_refused_as_a_whole(
    stage: Stage, backend: Backend
) -> None:
    prompt = picture(0)
    del prompt["9"]
    with pytest.raises(PromptRefused) as caught:
        await backend.submit(prompt, prompt_id=new_id())
    assert caught.value.message == "Prompt has no outputs"
    if stage.abilities.reports_error_types:
        assert caught.value.details["kind"] == "prompt_no_outputs"


async def test_a_prompt_that_would_run_in_part_is_refused_and_does_not_run(
    stage: Stage,
    backend: Backend,
) -> None:
    needs(stage, "refuses_partial_prompts")
    prompt = stage.slow(new_color())
    prompt["50"] = node("SaveImage", filename_prefix="x")
    prompt_id = new_id()
    with pytest.raises(PromptRefused) as caught:
        await backend.submit(prompt, prompt_id=prompt_id)
    (problem,) = caught.value.details["problems"]
    assert (problem.node_id, problem.input_name) == ("50", "images")
    assert await backend.queue_length() == 0


async def test_an_unknown_node_type_is_named(backend: Backend) -> None:
    prompt = {"1": node("NoSuchNode")}
    with pytest.raises(PromptRefused, match="NoSuchNode"):
        await backend.submit(prompt, prompt_id=new_id())


async def test_a_failing_node_is_named_with_its_error(backend: Backend, tmp_path: Path) -> None:
    broken = tmp_path / f"{new_id()}.png"
    broken.write_bytes(b"no picture at all")
    uploaded = await backend.upload(broken)
    prompt = {
        "1": node("LoadImage", image=uploaded.value),
        "9": node("PreviewImage", images=["1", 0]),
    }
    run_id, events = await run(backend, prompt)
    failed = events[-1]
    assert isinstance(failed, Failed)
    assert (failed.run_id, failed.node_id, failed.node_type) == (run_id, "1", "LoadImage")
    assert failed.message
    assert failed.exception_type


async def test_an_upload_is_used_under_the_name_that_comes_back(
    backend: Backend, tmp_path: Path
) -> None:
    name = f"{new_id()}.png"
    first, other = tmp_path / "a" / name, tmp_path / "b" / name
    for path, data in ((first, PNG), (other, PNG + b"other")):
        path.parent.mkdir()
        path.write_bytes(data)
    uploads = [await backend.upload(path) for path in (first, first, other)]
    assert uploads[0].value == uploads[1].value != uploads[2].value
    prompt = {
        "1": node("LoadImage", image=uploads[2].value),
        "9": node("PreviewImage", images=["1", 0]),
    }
    _, events = await run(backend, prompt)
    assert isinstance(events[-1], Succeeded)


async def test_a_file_that_is_not_there_is_told_as_gone(backend: Backend, tmp_path: Path) -> None:
    run_id, _ = await run(backend, picture(new_color()))
    file = (await backend.outputs(run_id)).files[0]
    gone = type(file)("9", "images", f"{new_id()}.png")
    with pytest.raises(FileGone):
        await backend.fetch(gone, tmp_path / "x.png")
    assert os.listdir(tmp_path) == []


async def test_a_running_run_is_cancelled_for_certain(stage: Stage, backend: Backend) -> None:
    submitted = await backend.submit(stage.slow(new_color(), nodes=6), prompt_id=new_id())
    events: list[Any] = []
    async for event in backend.follow(submitted.run_id):
        events.append(event)
        if stage.is_under_way(event):
            assert await backend.cancel(submitted.run_id) is Cancellation.CANCELLED
    assert isinstance(events[-1], Cancelled)
    assert await backend.queue_length() == 0


async def test_a_waiting_run_is_cancelled_and_its_follower_told(
    stage: Stage, backend: Backend
) -> None:
    first = await backend.submit(stage.slow(new_color()), prompt_id=new_id())
    second = await backend.submit(picture(new_color()), prompt_id=new_id())
    following = asyncio.create_task(_events(backend, second.run_id))
    assert await backend.cancel(second.run_id) is Cancellation.CANCELLED
    assert (await following)[-1] == Cancelled(second.run_id)
    await backend.cancel(first.run_id)


async def test_a_cancel_after_the_end_says_so(backend: Backend) -> None:
    run_id, _ = await run(backend, picture(new_color()))
    assert await backend.cancel(run_id) is Cancellation.ENDED_BEFORE


async def test_a_run_that_never_was_is_not_found(backend: Backend) -> None:
    assert await backend.cancel(new_id()) is Cancellation.NOT_FOUND
    assert await backend.adopt(new_id()) is None
    with pytest.raises(RunLost):
        await backend.outputs(new_id())
    with pytest.raises(RunLost):
        await _events(backend, new_id())


async def test_a_run_that_waits_tells_how_many_are_ahead(stage: Stage) -> None:
    first = await stage.backend.submit(stage.slow(new_color()), prompt_id=new_id())
    second = await stage.backend.submit(picture(new_color()), prompt_id=new_id())
    other = stage.another()
    assert await other.queue_length() == 2
    async for event in other.follow(second.run_id):
        assert isinstance(event, Queued), "it waits for the first one"
        if event.ahead == 1:  # the first one may just be on its way from the queue to its run
            break
    await stage.backend.cancel(second.run_id)
    await stage.backend.cancel(first.run_id)


async def test_a_lost_connection_in_mid_run_loses_nothing_but_events(stage: Stage) -> None:
    if stage.drop is None:
        pytest.skip("no connection is kept")
    backend = stage.backend
    submitted = await backend.submit(stage.slow(new_color()), prompt_id=new_id())
    events: list[Any] = []
    async for event in backend.follow(submitted.run_id):
        events.append(event)
        if stage.is_under_way(event):
            # Some connect only now to hear of it.
            await asyncio.sleep(0.3)
            assert stage.drop()
    assert events[-1] == Succeeded(submitted.run_id)
    assert kinds(events).count("Reconnected") == 1
    assert kinds(events).count("Started") == 1
    assert (await backend.outputs(submitted.run_id)).files


async def test_the_next_run_after_a_lost_connection_hears_everything(stage: Stage) -> None:
    needs(stage, "reports_nodes")
    if stage.drop is None:
        pytest.skip("no connection is kept")
    await run(stage.backend, picture(new_color()))
    stage.drop()
    await asyncio.sleep(0.1)
    _, events = await run(stage.backend, picture(new_color()))
    assert kinds(events)[-3:] == ["NodeStarted", "NodeDone", "Succeeded"]


async def test_a_restarted_caller_adopts_its_run(stage: Stage) -> None:
    prompt_id = new_id()
    submitted = await stage.backend.submit(stage.slow(new_color()), prompt_id=prompt_id)
    await _until_started(stage.backend, submitted.run_id)
    await stage.backend.aclose()
    heir = stage.another()
    adopted = await heir.adopt(prompt_id)
    assert adopted is not None
    assert adopted.adopted
    events = await _events(heir, adopted.run_id)
    assert events[0] == Started(adopted.run_id)
    assert events[-1] == Succeeded(adopted.run_id)
    assert (await heir.outputs(adopted.run_id)).files


async def test_a_run_that_ended_meanwhile_is_adopted_with_its_end(stage: Stage) -> None:
    prompt_id = new_id()
    submitted = await stage.backend.submit(picture(new_color()), prompt_id=prompt_id)
    assert (await _events(stage.backend, submitted.run_id))[-1] == Succeeded(submitted.run_id)
    await stage.backend.aclose()
    heir = stage.another()
    adopted = await heir.adopt(prompt_id)
    assert adopted is not None
    events = await _events(heir, adopted.run_id)
    assert (events[0], events[-1]) == (Started(adopted.run_id), Succeeded(adopted.run_id))


async def test_after_free_nothing_is_kept(stage: Stage, backend: Backend) -> None:
    needs(stage, "frees")
    prompt = picture(new_color())
    await run(backend, prompt)
    await backend.free()
    await asyncio.sleep(0.5)
    run_id, events = await run(backend, prompt)
    assert events[-1] == Succeeded(run_id)
    assert Cached(run_id, ()) in events


async def test_runs_at_once_are_told_apart(backend: Backend) -> None:
    results = await asyncio.gather(*(run(backend, picture(new_color())) for _ in range(8)))
    for run_id, events in results:
        assert events[-1] == Succeeded(run_id)
        assert {event.run_id for event in events} == {run_id}


async def test_progress_counts_up_to_the_total(stage: Stage, backend: Backend) -> None:
    needs(stage, "reports_nodes")
    if "ComfyfleetSteps" not in (await backend.describe()).object_info:
        pytest.skip("no node of this server reports steps")
    prompt = {"1": node("ComfyfleetSteps", steps=3, step_ms=1, previews=True)}
    _, events = await run(backend, prompt)
    steps = [(event.done, event.total) for event in events if isinstance(event, Progress)]
    assert steps == [(1, 3), (2, 3), (3, 3)]
    assert kinds(events).count("Preview") == 3


async def _events(backend: Backend, run_id: str) -> list[Any]:
    return [event async for event in backend.follow(run_id)]


async def _until_started(backend: Backend, run_id: str) -> None:
    async for event in backend.follow(run_id):
        if isinstance(event, Started):
            return
