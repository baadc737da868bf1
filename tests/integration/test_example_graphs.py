"""The example graphs, decided by us and worked by the built-in engine, with nothing in between."""

import contextlib
import json
import time
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import PIL.Image
import pytest
from tests.unit.graphs.builders import (
    EXAMPLES,
    example_catalogue,
    example_drafts,
    example_object_info,
)

from comfyfleet.api.graph_model import GraphDefinition
from comfyfleet.api.graph_parse import parse_graph_text, write_graph
from comfyfleet.engine import Served, serve_in_thread
from comfyfleet.server.catalog.model import WorkflowVersion
from comfyfleet.server.catalog.payload import build_payload
from comfyfleet.server.graphs.decide import new_run, next_actions
from comfyfleet.server.graphs.plan import plan_of
from comfyfleet.server.graphs.run import (
    Choice,
    Environment,
    Event,
    GraphRunState,
    GraphRunStatus,
    JobDone,
    QuestionAnswered,
    StartJob,
)
from comfyfleet.server.graphs.validate import check_graph

WORLD = Environment(datetime(2026, 1, 1, tzinfo=UTC))
WAIT_SECONDS_MAX = 60
KINDS = {".png": "image/png", ".mp4": "video/mp4"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_in_thread(data=tmp_path_factory.mktemp("engine")) as served:
        yield served


class Bench:
    """An engine and the files that are handed from job to job, by their ids."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.names: dict[UUID, str] = {}
        self.object_info = example_object_info()

    def file(self, path: Path) -> dict[str, Any]:
        file_id = uuid4()
        self.names[file_id] = f"{file_id}{path.suffix}"
        data = path.read_bytes()
        (self.served.engine.folders.input / self.names[file_id]).write_bytes(data)
        return {"file_id": str(file_id), "path": str(path), "mime_type": KINDS[path.suffix]}

    def prompt(self, job: StartJob) -> dict[str, Any]:
        draft = example_drafts()[job.workflow]
        version = WorkflowVersion(
            1, 1, draft.kind, "", "", draft.properties, draft.output_node_id, (), (), WORLD.now
        )
        document = json.loads(draft.document)
        built = build_payload(version, document, self.object_info, job.values, {}, seed=1)
        for asset in built.assets:
            node, _, name = str(asset.binding).partition(".")
            built.prompt[node]["inputs"][name] = self.names[asset.file_id]
        return built.prompt

    def work(self, job: StartJob) -> dict[str, Any]:
        with httpx.Client(base_url=self.served.url) as client:
            sent = client.post("/prompt", json={"prompt": self.prompt(job)}).raise_for_status()
            prompt_id = sent.json()["prompt_id"]
            deadline = time.monotonic() + WAIT_SECONDS_MAX
            while prompt_id not in (found := client.get(f"/history/{prompt_id}").json()):
                assert time.monotonic() < deadline
                time.sleep(0.02)
        outputs = found[prompt_id]["outputs"][example_drafts()[job.workflow].output_node_id or ""]
        folder = self.served.engine.folders.output
        files = [
            self.file(folder / each["subfolder"] / each["filename"])
            for each in outputs.get("images", ())
        ]
        text = "\n".join(outputs.get("text", ()))
        shown = {"text": text, "json": number_in(text)}
        return {
            "files": files,
            "prompt_id": prompt_id,
            "execution_time": 0.1,
            **shown,
            **_sizes(files),
        }


def number_in(text: str) -> float | None:
    with contextlib.suppress(ValueError):
        return float(text)
    return None


def _sizes(files: list[dict[str, Any]]) -> dict[str, Any]:
    pictures = [each for each in files if each["mime_type"] == "image/png"]
    if not pictures:
        return {"images": [], "width": 0, "height": 0}
    with PIL.Image.open(pictures[0]["path"]) as picture:
        return {"images": pictures, "width": picture.width, "height": picture.height}


def example(name: str) -> GraphDefinition:
    parsed = parse_graph_text((EXAMPLES / f"graphs/{name}.yaml").read_text("utf-8"))
    assert parsed.problems == ()
    return parsed.graph


def played(bench: Bench, name: str, **inputs: Any) -> GraphRunState:
    graph, library = example(name), {("One row", 1): example("one-row")}
    catalogue = example_catalogue()
    assert check_graph(write_graph(graph), catalogue, library=library).problems == ()
    plan = plan_of(graph, catalogue, library)
    advance = next_actions(plan, new_run(plan, uuid4(), inputs), (), WORLD)
    jobs: deque[StartJob] = deque()
    while not advance.run.status.is_over:
        jobs += [each for each in advance.actions if isinstance(each, StartJob)]
        if advance.run.asking:
            (key,) = advance.run.asking
            event: Event = QuestionAnswered(key, Choice.APPROVE, picked=(1,))
        else:
            job = jobs.pop()  # the last first: the order of results is not that of work
            event = JobDone(job.key, job.attempt, bench.work(job))
        advance = next_actions(plan, advance.run, (event,), WORLD)
    assert advance.run.status == GraphRunStatus.COMPLETED
    return advance.run


@pytest.mark.parametrize(("width", "count"), [(640, 2), (320, 1)])
def test_a_picture_is_softened_only_if_it_is_large(engine: Served, width: int, count: int) -> None:
    """The workflow that softens saves the picture before and after."""
    run = played(Bench(engine), "soften-if-large", width=width)
    assert len((run.outputs or {})["picture"]) == count


def test_an_album_has_each_photo_before_and_after(engine: Served) -> None:
    bench = Bench(engine)
    photos = [bench.file(EXAMPLES / "inputs/photo.png") for _ in range(3)]
    run = played(bench, "album", photos=photos)
    assert len((run.outputs or {})["result"]) == 6


def test_pictures_and_a_clip_come_out_together(engine: Served) -> None:
    bench = Bench(engine)
    photo, clip = (
        bench.file(EXAMPLES / "inputs/photo.png"),
        bench.file(EXAMPLES / "inputs/clip.mp4"),
    )
    run = played(bench, "picture-and-clip", photo=photo, clip=clip)
    outputs = run.outputs or {}
    assert len(outputs["pictures"]) == 6
    assert outputs["everything"]["count"] == 2
    (video,) = outputs["everything"]["merged"][1]["files"]
    assert video["mime_type"] == "video/mp4"


def test_the_best_two_of_eight_are_kept(engine: Served) -> None:
    outputs = played(Bench(engine), "best-of-eight").outputs or {}
    assert len(outputs["best"]) == 2
    scores = [each["score"] for each in outputs["scores"]]
    assert len(scores) == 8
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > 0.9 > scores[-1]


def test_a_photo_is_refined_until_it_is_sharp(engine: Served) -> None:
    bench = Bench(engine)
    photo = bench.file(EXAMPLES / "inputs/photo.png")
    at_once = played(bench, "refine-until-sharp", photo=photo, sharp_enough=0.0).outputs or {}
    never = played(bench, "refine-until-sharp", photo=photo, sharp_enough=9.0).outputs or {}
    assert (at_once["rounds"], never["rounds"]) == (1, 4)
    assert never["picture"]["mime_type"] == "image/png"


def test_words_about_a_photo_decide_what_happens_to_it(engine: Served) -> None:
    bench = Bench(engine)
    photo = bench.file(EXAMPLES / "inputs/photo.png")
    run = played(bench, "caption-then-decide", photo=photo)
    outputs = run.outputs or {}
    assert outputs["words"].endswith(("MOSTLY RED", "MOSTLY GREEN", "MOSTLY BLUE"))
    ran = [name for name in ("dark", "bright", "other") if run.tally(name).done]
    assert len(ran) == 1
    assert outputs["pictures"]


def test_a_person_picks_what_goes_into_the_album(engine: Served) -> None:
    bench = Bench(engine)
    photos = [bench.file(EXAMPLES / "inputs/photo.png") for _ in range(2)]
    outputs = played(bench, "album-with-approval", photos=photos).outputs or {}
    assert len(outputs["album"]["images"]) == 1


def test_rows_of_a_table_go_through_a_graph_and_keep_their_order(engine: Served) -> None:
    rows = [{"name": "sky", "width": 64, "colour": 255}, {"name": "sand", "width": 32, "colour": 7}]
    outputs = played(Bench(engine), "batch-from-csv", rows=rows).outputs or {}
    assert [row["item"]["name"] for row in outputs["table"]] == ["sky", "sand"]
    assert [row["output"]["title"] for row in outputs["table"]] == ["sky, 64 wide", "sand, 32 wide"]
    assert len(outputs["pictures"]) == 2
