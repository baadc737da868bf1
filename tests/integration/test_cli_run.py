"""`comfyfleet run` and `watch` against an engine that is really served."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import httpx
import PIL.Image
import pytest
from starlette.responses import JSONResponse
from tests.support.backends.comfy_cloud import CloudAccount, serving_cloud
from tests.support.backends.stub_server import StubServer, serving_stub
from tests.support.server.commands import EXAMPLES, NEGATIVE, SOFTEN, Result, comfyfleet
from tests.support.server.small_http import Answer, serving

from comfyfleet.engine import Served, serve_in_thread

VIDEO = str(EXAMPLES / "workflows" / "video.json")
PHOTO = str(EXAMPLES / "inputs" / "photo.png")
CLIP = str(EXAMPLES / "inputs" / "clip.mp4")
WAIT_SECONDS_MAX = 10.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_in_thread(data=tmp_path_factory.mktemp("engine")) as served:
        yield served


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, served: Served | None = None) -> Result:
    where = ("--server", served.url) if served else ()
    return comfyfleet("run", *arguments, *where)


def node(class_type: str, title: str = "", **inputs: Any) -> dict[str, Any]:
    meta = {"_meta": {"title": title}} if title else {}
    return {"class_type": class_type, "inputs": inputs, **meta}


def saved(path: Path, **nodes: Any) -> str:
    """A prompt in a file; node `n1` is node 1."""
    path.write_text(json.dumps({name.removeprefix("n"): entry for name, entry in nodes.items()}))
    return str(path)


def steps(folder: Path, steps: int, step_ms: int) -> str:
    slow = node("ComfyfleetSteps", "Slow", steps=steps, step_ms=step_ms, previews=True)
    kept = node("SaveImage", images=["1", 0], filename_prefix="slow")
    return saved(folder / "steps.json", n1=slow, n2=kept)


def events(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.out.splitlines()]


def wait_for(happened: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_workflow_runs_on_the_built_in_engine_without_any_option(folder: Path) -> None:
    result = run(NEGATIVE)
    assert (result.code, result.out) == (0, "output/negative_384.png\n")
    assert "done in" in result.lines[-1]
    with PIL.Image.open(folder / "output" / "negative_384.png") as picture:
        assert picture.size == (192, 192)
        # The workflow is in the picture, as the editor puts it there.
        assert json.loads(picture.info["workflow"])["nodes"]


def test_nothing_is_overwritten(engine: Served, folder: Path) -> None:
    names = [run(NEGATIVE, "-o", "made", served=engine).out.strip() for _ in range(3)]
    assert names == ["made/negative_384.png", "made/negative_384-2.png", "made/negative_384-3.png"]


def test_a_picture_is_uploaded_and_its_name_set(engine: Served) -> None:
    result = run(SOFTEN, "--image", PHOTO, served=engine)
    assert result.code == 0, result.err
    assert result.out.splitlines() == ["output/softened.png", "output/softened-2.png"]
    assert f"uploaded {PHOTO}" in result.lines


def test_a_video_keeps_its_frames(engine: Served) -> None:
    result = run(VIDEO, "--video", CLIP, served=engine)
    assert result.code == 0, result.err
    assert result.out == "output/video/inverted.mp4\n"
    with av.open(CLIP) as before, av.open("output/video/inverted.mp4") as after:
        assert sum(1 for _ in after.decode(video=0)) == sum(1 for _ in before.decode(video=0))


def test_a_file_that_lies_beside_the_workflow_is_uploaded(engine: Served, folder: Path) -> None:
    PIL.Image.new("RGB", (8, 8), "red").save(folder / "mine.png")
    passed = node("ComfyfleetPassFile", file="mine.png", filename_prefix="copy")
    result = run(saved(folder / "flow.json", n1=passed), served=engine)
    assert result.out == "output/copy.png\n"
    assert Path("output/copy.png").read_bytes() == (folder / "mine.png").read_bytes()


def test_values_are_set_as_in_convert(engine: Served) -> None:
    run(NEGATIVE, "--set", "Canvas.width=64", "--set", "Canvas.height=32", "--prefix", "tiny", served=engine)  # fmt: skip
    with PIL.Image.open("output/tiny.png") as picture:
        assert picture.size == (32, 16)


def test_a_failure_names_the_node_and_the_reason(engine: Served, folder: Path) -> None:
    failing = node("ComfyfleetFail", "Break it", fail=True, message="no luck today", after_ms=0)
    result = run(saved(folder / "flow.json", n5=failing), served=engine)
    assert (result.code, result.out) == (1, "")
    assert result.lines[-1] == 'error: node 5 "Break it" (ComfyfleetFail) failed: no luck today'
    assert not Path("output").exists()


def test_a_refusal_names_node_input_and_what_is_allowed(engine: Served, folder: Path) -> None:
    canvas = node("EmptyImage", "Canvas", width=-5, height=64, batch_size=1, color=0)
    kept = node("SaveImage", images=["1", 0], filename_prefix="x")
    result = run(saved(folder / "flow.json", n1=canvas, n2=kept), served=engine)
    assert result.code == 1
    problem = next(line for line in result.lines if "node 1" in line)
    assert "(Canvas), input width" in problem
    assert "received -5" in problem
    assert "at least 1" in problem


def test_a_file_that_is_nowhere_is_told_before_the_refusal(engine: Served, folder: Path) -> None:
    load = node("LoadImage", "Photo", image="nowhere.png")
    kept = node("SaveImage", images=["1", 0], filename_prefix="x")
    result = run(saved(folder / "flow.json", n1=load, n2=kept), served=engine)
    assert result.code == 1
    assert result.lines[0].startswith("warning: nowhere.png is neither in the file's folder nor on")
    assert any("Invalid image file: nowhere.png" in line for line in result.lines)


def test_missing_node_types_are_listed_with_what_to_do(folder: Path) -> None:
    sampler = {"id": 3, "type": "KSampler", "title": "Main", "properties": {"cnr_id": "comfy-core"}}
    other = {"id": 4, "type": "FancyNode", "properties": {"cnr_id": "fancy-pack"}}
    path = folder / "flow.json"
    path.write_text(json.dumps({"nodes": [sampler, other], "links": [], "version": 0.4}))
    result = run(str(path))
    assert (result.code, result.out) == (1, "")
    assert result.lines[0] == "error: the built-in engine lacks 2 node types:"
    assert result.lines[1] == "  FancyNode: node 4 (node pack fancy-pack)"
    assert 'KSampler: node 3 "Main"' in result.lines[2]
    assert "--server" in result.lines[-1]


def test_missing_node_types_of_a_prompt_are_listed_too(engine: Served, folder: Path) -> None:
    result = run(saved(folder / "flow.json", n3=node("KSampler", seed=1)), served=engine)
    assert result.lines[0] == f"error: {engine.url} lacks 1 node type:"


def test_a_dry_run_prints_the_prompt_and_the_uploads(engine: Served) -> None:
    (engine.engine.folders.input / "photo.png").unlink(missing_ok=True)
    before = httpx.get(f"{engine.url}/history").json()
    result = run(SOFTEN, "--image", PHOTO, "--dry-run", served=engine)
    assert result.json["1"]["inputs"]["image"] == "photo.png"
    assert f"would upload {PHOTO} for 1.image" in result.lines
    assert result.lines[-1] == f"would run 1 prompt on {engine.url}"
    assert httpx.get(f"{engine.url}/history").json() == before
    assert not (engine.engine.folders.input / "photo.png").exists()
    assert not Path("output").exists()


def test_events_are_told_as_json_lines(engine: Served, folder: Path) -> None:
    told = events(run(steps(folder, 3, 5), "--json", served=engine))
    names = [event["event"] for event in told]
    assert names[0] == "submitted"
    assert names[-3:] == ["succeeded", "saved", "value"]
    assert {"queued", "started", "node_started", "progress", "preview"} <= set(names)
    progress = [event for event in told if event["event"] == "progress"]
    assert progress[-1]["done"] == progress[-1]["total"] == 3
    assert [event["fraction"] for event in told if "fraction" in event][-1] == 1.0
    assert told[-2]["path"] == "output/slow.png"


def words(folder: Path) -> str:
    shown = node("PreviewAny", source=["1", 0])
    return saved(folder / "words.json", n1=node("PrimitiveInt", value=42), n2=shown)


def test_a_workflow_that_only_makes_text_prints_it(engine: Served, folder: Path) -> None:
    result = run(words(folder), served=engine)
    assert (result.code, result.out) == (0, "42\n")
    assert "0 files, 1 value" in result.err


def test_values_are_events_of_json_lines(engine: Served, folder: Path) -> None:
    told = events(run(words(folder), "--json", served=engine))
    assert told[-1] == {"event": "value", "node_id": "2", "name": "text", "value": "42"}


def test_a_failure_is_an_event_too(engine: Served, folder: Path) -> None:
    failing = node("ComfyfleetFail", fail=True, message="no luck", after_ms=0)
    result = run(saved(folder / "flow.json", n5=failing), "--json", served=engine)
    assert result.code == 1
    assert events(result)[-1]["code"] == "run_failed"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["no-such-file.json"], "invalid_input"),
        ([NEGATIVE, "--server", "http://127.0.0.1:9"], "server_unavailable"),
        (["sampler.json"], "unknown_node_types"),
        (["sampler.json", "--detach"], "invalid_input"),
    ],
)
def test_an_error_before_the_submit_is_an_event_too(
    folder: Path, arguments: list[str], code: str
) -> None:
    saved(folder / "sampler.json", n3=node("KSampler", seed=1))
    result = run(*arguments, "--json")
    assert result.code == 1
    assert [(event["event"], event["code"]) for event in events(result)] == [("error", code)]


@pytest.mark.parametrize("option", ["--prompt", "--negative", "--steps", "--model"])
def test_a_value_that_fits_no_node_is_an_error(engine: Served, option: str) -> None:
    result = run(NEGATIVE, option, "7", served=engine)
    assert (result.code, result.out) == (1, "")
    assert f"{option}: not set, no input found" in result.err
    assert "--set NODE.INPUT=VALUE" in result.lines[-1]
    assert not Path("output").exists()


def test_every_cell_is_checked_before_the_first_row_runs(engine: Served, folder: Path) -> None:
    (folder / "values.csv").write_text("Canvas.width\n64\nwide\n")
    before = httpx.get(f"{engine.url}/history").json()
    result = run(NEGATIVE, "--batch", "values.csv", served=engine)
    assert (result.code, result.out) == (1, "")
    assert result.lines[-2].startswith("error: row 2: ")
    assert httpx.get(f"{engine.url}/history").json() == before


def test_files_and_texts_of_a_row_have_a_column_each(engine: Served, folder: Path) -> None:
    prompt = json.loads(Path(words(folder)).read_text())
    prompt["3"] = node("EmptyImage", width=8, height=8, batch_size=1, color=0)
    prompt["4"] = node("SaveImage", images=["3", 0], filename_prefix="both")
    (folder / "both.json").write_text(json.dumps(prompt))
    table = run("both.json", "--count", "2", served=engine).out.splitlines()
    assert table[0].split() == ["run", "seconds", "result", "shown"]
    assert table[1].split()[2:] == ["output/both.png", "42"]


def json_answer(value: Any, status: int = 200) -> Answer:
    return Answer(json.dumps(value).encode(), status)


def core_sampler(folder: Path) -> str:
    sampler = {"id": 3, "type": "KSampler", "properties": {"cnr_id": "comfy-core"}}
    path = folder / "core.json"
    path.write_text(json.dumps({"nodes": [sampler], "links": [], "version": 0.4}))
    return str(path)


def test_missing_nodes_of_comfyui_itself_need_an_update(folder: Path) -> None:
    types: dict[str, Any] = {"Other": {"input": {}, "output": []}}
    with serving({"/object_info": json_answer(types)}) as small:
        result = run(core_sampler(folder), "--server", small.url)
    assert "Update that ComfyUI" in result.lines[-1]
    assert "Install" not in result.lines[-1]


def test_a_served_built_in_engine_is_told_from_an_old_comfyui(engine: Served, folder: Path) -> None:
    hint = run(core_sampler(folder), served=engine).lines[-1]
    assert "built-in engine, which runs no models" in hint


MODEL_URL = "https://models.example.com/xl.safetensors"


async def test_a_missing_model_is_named_with_its_address_and_folder(folder: Path) -> None:
    loader = {
        "id": 1,
        "type": "CheckpointLoaderSimple",
        "widgets_values": ["xl.safetensors"],
        "properties": {
            "models": [{"name": "xl.safetensors", "url": MODEL_URL, "directory": "checkpoints"}]
        },
    }
    (folder / "flow.json").write_text(json.dumps({"nodes": [loader], "links": [], "version": 0.4}))
    names = {"input": {"required": {"ckpt_name": [["other.safetensors"]]}}, "output": []}
    types = {"CheckpointLoaderSimple": names | {"output_node": True}}
    refusal = {"error": {"type": "x", "message": "refused", "details": ""}, "node_errors": {}}
    stub = StubServer()
    stub.answers["GET /object_info"] = [JSONResponse(types), JSONResponse(types)]
    stub.answers["POST /prompt"] = [JSONResponse(refusal, 400)]
    async with serving_stub(stub):
        where = ("flow.json", "--server", stub.url)
        result = await asyncio.to_thread(run, *where, "--json")
        shown = await asyncio.to_thread(comfyfleet, "inspect", *where, width=200)
    words = f"xl.safetensors: download {MODEL_URL} into models/checkpoints"
    assert result.lines[-2:] == ["hint: Missing models:", f"  {words}"]
    assert f"doesn't have the model {words}" in result.err
    assert MODEL_URL in shown.out
    assert "models/checkpoints" in shown.out


def test_a_batch_runs_once_per_row_and_goes_on_after_a_failure(
    engine: Served, folder: Path
) -> None:
    canvas = node("EmptyImage", "Canvas", width=8, height=8, batch_size=1, color=0)
    gate = node(
        "ComfyfleetFail", "Gate", fail=False, message="row broke", after_ms=0, value=["1", 0]
    )
    kept = node("SaveImage", images=["2", 0], filename_prefix="b")
    flow = saved(folder / "flow.json", n1=canvas, n2=gate, n3=kept)
    (folder / "values.csv").write_text(
        "Canvas.width,Gate.fail,prefix\n16,,first\n8,true,\n24,,third\n"
    )
    result = run(flow, "--batch", "values.csv", served=engine)
    assert result.code == 1
    assert result.lines[-1] == "error: 1 of 3 rows failed: 2"
    table = [line.strip().split(maxsplit=2) for line in result.out.splitlines()]
    assert table[0] == ["row", "seconds", "result"]
    assert [(row[0], row[2]) for row in table[1:4]] == [
        ("1", "output/first.png"),
        ("2", 'node 2 "Gate" (ComfyfleetFail) failed: row broke'),
        ("3", "output/third.png"),
    ]
    with PIL.Image.open("output/third.png") as picture:
        assert picture.size == (24, 8)


def test_a_row_may_name_a_file_beside_the_table(engine: Served, folder: Path) -> None:
    (folder / "table").mkdir()
    for name, side in (("a.png", 4), ("b.png", 6)):
        PIL.Image.new("RGB", (side, side)).save(folder / "table" / name)
    (folder / "table" / "values.csv").write_text("image\na.png\nb.png\n")
    load = node("LoadImage", image="photo.png")
    kept = node("SaveImage", images=["1", 0], filename_prefix="row")
    flow = saved(folder / "flow.json", n1=load, n2=kept)
    result = run(flow, "--batch", "table/values.csv", served=engine)
    assert result.code == 0, result.err
    with PIL.Image.open("output/row-2.png") as picture:
        assert picture.size == (6, 6)


def test_the_least_busy_of_two_servers_takes_it(engine: Served, folder: Path) -> None:
    with serve_in_thread() as other:
        busy = json.loads(Path(steps(folder, 20, 100)).read_text())
        httpx.post(f"{other.url}/prompt", json={"prompt": busy}).raise_for_status()
        result = run(NEGATIVE, "--server", other.url, "--server", engine.url)
        httpx.post(f"{other.url}/interrupt")
    assert result.code == 0, result.err
    assert result.lines[0] == f"{engine.url} is the least busy: 0 prompts in its queue"
    assert f"on {engine.url}" in result.lines[-1]


def test_a_server_that_does_not_answer_is_left_out(engine: Served) -> None:
    result = run(NEGATIVE, "--server", "http://127.0.0.1:1", "--server", engine.url)
    assert result.code == 0
    assert result.lines[0].startswith("warning: http://127.0.0.1:1 is skipped: ")


def test_what_was_left_alone_can_be_watched(engine: Served, folder: Path) -> None:
    left = run(steps(folder, 10, 50), "--detach", served=engine)
    run_id = left.out.strip()
    assert left.lines[-1] == f"follow it with: comfyfleet watch {run_id} --server {engine.url}"
    watched = comfyfleet("watch", run_id, "--server", engine.url)
    assert watched.code == 0, watched.err
    assert watched.out == "output/slow.png\n"
    again = comfyfleet("watch", run_id, "--server", engine.url)
    assert again.out == "output/slow.png\n"


def test_nothing_can_be_left_with_the_built_in_engine() -> None:
    result = run(NEGATIVE, "--detach")
    assert result.code == 1
    assert "ends with this command" in result.lines[-2]


def test_a_run_that_nobody_knows(engine: Served) -> None:
    result = comfyfleet("watch", "00000000-0000-4000-8000-000000000000", "--server", engine.url)
    assert result.code == 1
    assert result.lines[-1].startswith("error: run 00000000")


def test_a_run_that_another_client_cancels_is_no_success(engine: Served, folder: Path) -> None:
    def cancel() -> None:
        wait_for(lambda: queue(engine)["queue_running"])
        httpx.post(f"{engine.url}/interrupt")

    other = threading.Thread(target=cancel)
    other.start()
    result = run(steps(folder, 100, 50), served=engine)
    other.join()
    assert result.code == 1
    assert result.lines[-1] == "error: the run was cancelled on the server"


def queue(engine: Served) -> Any:
    return httpx.get(f"{engine.url}/queue").json()


def interrupted(*arguments: str, when: Callable[[], Any]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a real process that got SIGINT."""
    with Path("stderr.txt").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", "from comfyfleet.cli import main; main()", *arguments],
            stderr=said,
            stdout=subprocess.PIPE,
            text=True,
            # As from a terminal: a shell in the background would have it ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    wait_for(when)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=WAIT_SECONDS_MAX)
    return process.returncode, out, Path("stderr.txt").read_text()


def test_ctrl_c_cancels_on_the_server(engine: Served, folder: Path) -> None:
    flow = steps(folder, 200, 50)
    running = lambda: queue(engine)["queue_running"]  # noqa: E731
    code, out, err = interrupted("run", flow, "--server", engine.url, when=running)
    assert (code, out) == (130, "")
    assert err.splitlines()[-1].startswith(f"cancelled on {engine.url}: run ")
    assert not queue(engine)["queue_running"]
    run_id = err.split()[-1]
    history = httpx.get(f"{engine.url}/history/{run_id}").json()
    assert "execution_interrupted" in [name for name, _ in history[run_id]["status"]["messages"]]


def test_ctrl_c_in_a_batch_keeps_the_rows_that_have_ended(engine: Served, folder: Path) -> None:
    flow = steps(folder, 1, 50)
    (folder / "values.csv").write_text("1.steps,prefix\n2,quick\n200,slow\n3,never\n")
    arguments = ("run", flow, "--batch", "values.csv", "--server", engine.url)

    def in_second_row() -> bool:
        return Path("output/quick.png").exists() and bool(queue(engine)["queue_running"])

    code, out, err = interrupted(*arguments, when=in_second_row)
    assert code == 130
    assert "output/quick.png" in out
    assert f"cancelled on {engine.url}" in err
    assert not any(queue(engine).values())
    assert not Path("output/never.png").exists()


def test_ctrl_c_stops_watching_and_the_run_goes_on(engine: Served, folder: Path) -> None:
    run_id = run(steps(folder, 1000, 50), "--detach", served=engine).out.strip()
    said = Path("stderr.txt")
    watching = lambda: said.exists() and "started" in said.read_text()  # noqa: E731
    code, _, err = interrupted("watch", run_id, "--server", engine.url, when=watching)
    assert code == 130
    assert err.splitlines()[-1] == f"no longer watched; run {run_id} continues"
    assert queue(engine)["queue_running"][0][1] == run_id
    httpx.post(f"{engine.url}/interrupt")


def test_a_run_that_is_silent_for_too_long_tells_the_way_back(engine: Served, folder: Path) -> None:
    limits = ("--timeout", "0.5", "--poll-interval", "0.1")
    result = run(steps(folder, 1, 3000), *limits, served=engine)
    httpx.post(f"{engine.url}/interrupt")
    assert result.code == 1
    assert "has shown no progress for 0.5 s" in result.lines[-2]
    assert f"--server {engine.url}" in result.lines[-1]


def test_parts_are_switched_off_as_in_convert(engine: Served) -> None:
    whole = run(SOFTEN, "--image", PHOTO, "--dry-run", served=engine).json
    less = run(SOFTEN, "--image", PHOTO, "--bypass", "Soften 3", "--dry-run", served=engine).json
    assert len(less) == len(whole) - 2


def test_of_several_servers_the_one_is_watched_that_has_the_run(
    engine: Served, folder: Path
) -> None:
    run_id = run(steps(folder, 2, 5), "--detach", served=engine).out.strip()
    with serve_in_thread() as other:
        servers = ("--server", other.url, "--server", engine.url)
        assert comfyfleet("watch", run_id, *servers).out == "output/slow.png\n"
        lost = comfyfleet("watch", "00000000-0000-4000-8000-000000000000", *servers)
    assert "Is it the right --server?" in lost.lines[-1]


def test_a_cloud_runs_it_and_can_be_watched(folder: Path) -> None:
    with serving_cloud({"key": CloudAccount("alice")}) as cloud:
        environ = {"COMFY_CLOUD_API_KEY": "key", "COMFY_CLOUD_BASE_URL": cloud.url}
        made = comfyfleet("run", SOFTEN, "--image", PHOTO, "--cloud", environ=environ)
        left = comfyfleet("run", steps(folder, 3, 20), "--cloud", "--detach", environ=environ)
        watched = comfyfleet("watch", left.out.strip(), "--cloud", environ=environ)
    assert made.code == 0, made.err
    assert len(made.out.splitlines()) == 2
    assert "done in" in made.lines[-1]
    assert "on Comfy Cloud: 2 files" in made.lines[-1]
    assert watched.code == 0, watched.err


def test_a_cloud_wants_a_key() -> None:
    result = run(NEGATIVE, "--cloud")
    assert (result.code, result.out) == (1, "")
    assert "COMFY_CLOUD_API_KEY is not set" in result.lines[0]


def test_a_server_and_a_cloud_are_one_too_many(engine: Served) -> None:
    assert run(NEGATIVE, "--cloud", served=engine).code == 2


def test_a_file_for_all_rows_is_uploaded_once(engine: Served, folder: Path) -> None:
    (folder / "values.csv").write_text("prefix\nx\ny\n")
    result = run(SOFTEN, "--image", PHOTO, "--batch", "values.csv", served=engine)
    assert result.code == 0, result.err
    assert result.lines.count(f"uploaded {PHOTO}") == 1


def test_a_missing_file_is_told_only_if_a_row_needs_it(engine: Served, folder: Path) -> None:
    load = node("LoadImage", "Photo", image="absent.png")
    kept = node("SaveImage", images=["1", 0], filename_prefix="x")
    flow = saved(folder / "flow.json", n1=load, n2=kept)
    for name in ("a.png", "absent.png"):
        (folder / "table" / name).parent.mkdir(exist_ok=True)
        (folder / "table" / name).write_bytes(Path(PHOTO).read_bytes())
    (folder / "table" / "none.csv").write_text("prefix\nx\ny\n")
    result = run(flow, "--batch", "table/none.csv", "--dry-run", served=engine)
    assert result.err.count("absent.png is neither in the file's folder") == 1
    (folder / "table" / "full.csv").write_text("image\na.png\nabsent.png\n")
    result = run(flow, "--batch", "table/full.csv", served=engine)
    assert result.code == 0, result.err
    assert "neither in the file's folder" not in result.err
    result = run(flow, "--batch", "table/full.csv", "--dry-run", served=engine)
    assert "neither in the file's folder" not in result.err


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--timeout", "0", "Use a number of seconds above 0."),
        ("--timeout", "-1", "Use a number of seconds above 0."),
        ("--poll-interval", "nan", "Use a number of seconds above 0."),
        ("--max-retries", "99", "Must be <= 20."),
        ("--count", "0", "Must be >= 1."),
    ],
)
def test_figures_that_make_no_sense_are_wrong_usage(option: str, value: str, problem: str) -> None:
    refused = run(NEGATIVE, option, value)
    assert refused.code == 2
    assert option in refused.lines[0]
    assert problem in refused.lines[0]


def test_a_run_that_waits_says_how_many_are_ahead(engine: Served, folder: Path) -> None:
    """Soon, although the next poll is far away."""
    busy = json.loads(Path(steps(folder, 600, 100)).read_text())
    httpx.post(f"{engine.url}/prompt", json={"prompt": busy}).raise_for_status()
    words = ("run", NEGATIVE, "--json", "--poll-interval", "600", "--server", engine.url)
    command = [sys.executable, "-m", "comfyfleet", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        told = (json.loads(line) for line in process.stdout)
        found = next((each for each in told if each["event"] == "queued" and each["ahead"]), None)
        httpx.post(f"{engine.url}/interrupt")
        process.stdout.read()
    assert found
    assert found["ahead"] == 1
    assert process.returncode == 0


def test_a_folder_that_cannot_be_is_told_before_the_run(folder: Path) -> None:
    (folder / "taken").write_text("")
    result = run(NEGATIVE, "-o", "taken")
    assert (result.code, len(result.lines)) == (1, 1)
    assert "isn't a folder" in result.lines[0]


def test_a_picture_that_was_made_can_be_run_again(engine: Served) -> None:
    made = run(NEGATIVE, served=engine).out.strip()
    assert run(made, served=engine).out == "output/negative_384-2.png\n"


def noise(folder: Path, prefix: str = "noise") -> str:
    """A prompt whose picture depends on its seed."""
    blank = node("EmptyImage", width=8, height=8, batch_size=1, color=0)
    noisy = node("ImageAddNoise", "Noise", image=["1", 0], seed=1, strength=1.0)
    kept = node("SaveImage", images=["2", 0], filename_prefix=prefix)
    return saved(folder / "noise.json", n1=blank, n2=noisy, n3=kept)


def seeds_said(result: Result) -> list[int]:
    return [int(seed) for seed in re.findall(r'"seed": (\d+)', result.out)]


def test_a_random_seed_is_a_new_one_each_time(engine: Served, folder: Path) -> None:
    flow = noise(folder)
    first = run(flow, "--seed", "random", served=engine)
    again = run(flow, "--seed", "random", served=engine)
    assert first.code == again.code == 0, first.err
    assert Path("output/noise.png").read_bytes() != Path("output/noise-2.png").read_bytes()


def test_a_count_runs_so_many_times_with_a_seed_each(engine: Served, folder: Path) -> None:
    flow = noise(folder)
    result = run(flow, "--count", "3", served=engine)
    assert result.code == 0, result.err
    assert "run 3 of 3" in result.err
    pictures = {path.read_bytes() for path in Path("output").iterdir()}
    assert len(pictures) == 3
    assert seeds_said(run(flow, "--count", "3", "--seed", "7", "--dry-run")) == [7, 8, 9]
    fixed = run(flow, "--count", "2", "--set", "Noise.seed=5", "--dry-run")
    assert seeds_said(fixed) == [5, 5]
    assert "there is no seed to change" in fixed.err


def test_a_count_is_of_each_row(engine: Served, folder: Path) -> None:
    (folder / "values.csv").write_text("prefix,seed\na,\nb,4\n")
    result = run(noise(folder), "--batch", "values.csv", "--count", "2", "--seed", "1", "--dry-run")
    assert seeds_said(result) == [1, 2, 4, 4]


def test_a_number_as_batch_is_the_batch_size(engine: Served, folder: Path) -> None:
    result = run(NEGATIVE, "--batch", "3", "--dry-run", served=engine)
    assert result.code == 0, result.err
    assert '"batch_size": 3' in result.out


def test_a_subfolder_of_the_prefix_is_kept(engine: Served, folder: Path) -> None:
    result = run(noise(folder, "shots/day 1/noise"), served=engine)
    assert result.code == 0, result.err
    assert result.out.strip() == "output/shots/day 1/noise.png"


def test_a_run_that_goes_on_is_not_given_up_however_long_it_takes(
    engine: Served, folder: Path
) -> None:
    """Its steps take three times as long as it may be silent."""
    result = run(steps(folder, 12, 250), "--timeout", "1", "--poll-interval", "0.2", served=engine)
    assert result.code == 0, result.err


def test_a_silent_run_is_given_up_with_a_hint_that_helps(folder: Path) -> None:
    result = run(steps(folder, 1, 3000), "--timeout", "0.5", "--poll-interval", "0.1")
    assert result.code == 1
    assert "has shown no progress for 0.5 s" in result.err
    assert result.lines[-1] == "hint: Use --timeout SECONDS to allow more time."


def test_a_folder_in_which_nothing_can_be_made_is_told_before_the_run(folder: Path) -> None:
    result = run(NEGATIVE, "-o", "/proc/x")
    assert result.code == 1
    assert "results can't be saved in /proc/x" in result.lines[0]
    assert "timeout" not in result.err
    assert run(NEGATIVE, "-o", "a/b", "--dry-run").code == 0
    assert not (folder / "a").exists()


def test_hints_name_options_that_the_command_has(folder: Path) -> None:
    assert "--object-info" not in run(NEGATIVE, "--server", "http://127.0.0.1:1").err
    for missing in (("--image", "no.png"), ("--batch", "no.csv")):
        result = run(SOFTEN, *missing)
        assert result.code == 1
        assert "file no." in result.err
        assert "stdin" not in result.err


def test_watching_tells_titles_and_how_many_nodes_there_are(engine: Served, folder: Path) -> None:
    run_id = run(steps(folder, 4, 100), "--detach", served=engine).out.strip()
    watched = comfyfleet("watch", run_id, "--server", engine.url)
    assert watched.code == 0, watched.err
    assert not re.search(r"^node \d+$", watched.err, re.MULTILINE)
    assert any(re.fullmatch(r"(Slow|SaveImage) \(\d of 2\)", line) for line in watched.lines)


def test_an_ended_run_that_is_watched_twice_is_saved_once(engine: Served, folder: Path) -> None:
    run_id = run(noise(folder), "--seed", "77", "--detach", served=engine).out.strip()
    for _ in range(2):
        watched = comfyfleet("watch", run_id, "--server", engine.url)
        assert watched.out == "output/noise.png\n", watched.err
    assert [path.name for path in Path("output").iterdir()] == ["noise.png"]


def test_help_of_watch_does_not_promise_the_built_in_engine() -> None:
    assert "built-in engine runs it" not in comfyfleet("watch", "--help").out


def test_nothing_is_said_after_the_last_line_of_a_run() -> None:
    """As a process: the built-in engine is one of its own, and ends without a word."""
    program = "from comfyfleet.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "run", NEGATIVE], capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1].startswith("done in ")
