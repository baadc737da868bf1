"""What can be set about Comfy Cloud, by environment or by hand."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from comfyfleet.comfy.settings import Limits, limits

DEFAULT_CLOUD_URL = "https://cloud.comfy.org"


@dataclass(frozen=True, slots=True)
class CloudSettings:
    """`key` is left out of every text that is made of this."""

    key: str = field(default="", repr=False)
    base_url: str = DEFAULT_CLOUD_URL
    limits: Limits = field(default_factory=Limits)


def cloud_settings(environ: Mapping[str, str]) -> CloudSettings:
    return CloudSettings(
        key=environ.get("COMFY_CLOUD_API_KEY") or "",
        base_url=environ.get("COMFY_CLOUD_BASE_URL") or DEFAULT_CLOUD_URL,
        limits=limits(environ),
    )
