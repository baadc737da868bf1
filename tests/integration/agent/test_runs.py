"""One worker, one engine: jobs from lease to result."""

from pathlib import Path

from blake3 import blake3
from tests.agentkit.plane import Plane, eventually
from tests.agentkit.prompts import picture
from tests.agentkit.workers import settings_for, working

from comfyfleet.engine.serve import Served as Engine

PNG_HEAD = b"\x89PNG"


async def test_a_picture_is_made_and_delivered(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    job = plane.add(picture())
    async with working(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: job.word)
    (output,) = job.result.outputs
    data = plane.delivered(job)
    assert data.startswith(PNG_HEAD)
    assert (output.name, output.size, output.content_type) == ("output", len(data), "image/png")
    assert output.content_hash == blake3(data).hexdigest()
    assert (output.node_id, output.kind) == ("9", "images")
    assert (output.filename or "").startswith("made_")
