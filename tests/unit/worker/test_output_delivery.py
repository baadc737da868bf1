"""Small outputs go with the final report, and files of the output node before the run has ended."""

from pathlib import Path
from typing import cast

import pytest
from tests.support.workers.memory_plane import eventually
from tests.unit.worker.test_failures import JOB

from comfyfleet.comfy import Backend, OutputFile, Outputs
from comfyfleet.comfy.backend import Fetched
from comfyfleet.comfy.events import NodeDone
from comfyfleet.errors import InvalidInput
from comfyfleet.worker.files import OutputDelivery, OutputUploads, ReadyFile, UploadGate

CONTENT = b"not a picture"


class Files:
    """A backend with files, and the store's uploads."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content = content
        self.fetched: list[str] = []
        self.uploaded: list[str] = []

    async def fetch(self, file: OutputFile, to: Path, *, bytes_max: int | None = None) -> Fetched:
        self.fetched.append(file.filename)
        path = to.with_name(file.filename)
        path.write_bytes(self.content)
        return Fetched(path, len(self.content), "text/plain")

    async def put(self, file: ReadyFile, *, name: str, content_type: str) -> None:
        self.uploaded.append(name)


def delivery(
    files: Files, folder: Path, *, inline_bytes_max: int = 0, strip_metadata: bool = False
) -> OutputDelivery:
    changes = {
        "inline_bytes_max": inline_bytes_max,
        "output_node_id": "9",
        "strip_metadata": strip_metadata,
    }
    job = JOB.model_copy(update=changes)
    uploads = cast(OutputUploads, files)
    return OutputDelivery(job, cast(Backend, files), uploads, UploadGate(), folder)


def made(*names: str) -> Outputs:
    return Outputs(tuple(OutputFile("9", "images", name, "", "output", False) for name in names))


@pytest.mark.parametrize(("most", "inline"), [(0, 0), (len(CONTENT), 1), (2 * len(CONTENT), 2)])
async def test_small_files_go_with_the_report_up_to_the_limit(
    tmp_path: Path, most: int, inline: int
) -> None:
    files = Files()
    outputs = await delivery(files, tmp_path, inline_bytes_max=most).deliver_all(
        made("a.txt", "b.txt")
    )
    assert [output.content is not None for output in outputs] == [inline > 0, inline > 1]
    assert len(files.uploaded) == 2 - inline


async def test_files_of_the_output_node_are_delivered_before_the_run_has_ended(
    tmp_path: Path,
) -> None:
    files = Files()
    early = delivery(files, tmp_path)
    shown = {"images": [{"filename": "a.txt", "subfolder": "", "type": "output"}]}
    early.begin(NodeDone("run", "8", shown))  # another node
    early.begin(NodeDone("run", "9", shown))
    await eventually(lambda: bool(files.uploaded))
    outputs = await early.deliver_all(made("a.txt"))
    assert [output.filename for output in outputs] == ["a.txt"]
    assert files.fetched == ["a.txt"], "once"
    await early.close()


async def test_a_file_whose_prompt_cannot_be_removed_is_refused_by_its_name(
    tmp_path: Path,
) -> None:
    files = Files(b'{"class_type": "KSampler"}')
    outputs = made("my graph.json")
    with pytest.raises(InvalidInput, match=r"my graph\.json .* keep_metadata"):
        await delivery(files, tmp_path, strip_metadata=True).deliver_all(outputs)
    assert not files.uploaded
    await delivery(files, tmp_path).deliver_all(outputs)
    assert files.uploaded
