"""How long a film is, and how large, where PyAV is installed."""

import io
from collections.abc import Mapping
from typing import Any

from comfyfleet.kernel.demuxers import OPEN_OPTIONS


def film_facts(data: bytes) -> Mapping[str, Any]:
    """Nothing without PyAV, and nothing of what it can't read. Blocking."""
    try:
        import av
    except ImportError:
        return {}
    try:
        with av.open(io.BytesIO(data), "r", options=dict(OPEN_OPTIONS)) as container:
            facts: dict[str, Any] = {}
            if container.duration is not None:
                facts["duration_seconds"] = round(container.duration / av.time_base, 3)
            for stream in container.streams.video[:1]:
                facts |= {"width": stream.width, "height": stream.height}
            return facts
    except (av.FFmpegError, ValueError, EOFError):
        return {}
