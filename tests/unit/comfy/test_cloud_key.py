import pytest

from comfyfleet.comfy import CloudSettings, ComfyCloud
from comfyfleet.errors import InvalidValue


async def test_a_key_is_not_sent_over_plain_http_to_another_machine() -> None:
    with pytest.raises(InvalidValue, match="Use https"):
        ComfyCloud(CloudSettings("secret", "http://cloud.example"))


@pytest.mark.parametrize(
    ("key", "url"),
    [("secret", "https://cloud.example"), ("secret", "http://127.0.0.1:1"), ("", "http://lan")],
)
async def test_a_key_is_sent_encrypted_or_on_this_machine(key: str, url: str) -> None:
    await ComfyCloud(CloudSettings(key, url)).aclose()
