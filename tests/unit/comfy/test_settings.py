import pytest

from comfyfleet.comfy.backend import BackendLimits, ServerSettings, server_settings
from comfyfleet.errors import InvalidValue


def test_an_empty_environment_gives_the_defaults() -> None:
    settings = server_settings({})
    assert settings == ServerSettings("http://localhost:8188", BackendLimits())
    limits = settings.limits
    assert (limits.job_seconds, limits.max_retries, limits.poll_seconds) == (300, 3, 5)


def test_the_environment_sets_address_and_limits() -> None:
    settings = server_settings(
        {
            "COMFYUI_BASE_URL": "http://gpu:1",
            "COMFYUI_TIMEOUT": "12.5",
            "COMFYUI_MAX_RETRIES": "0",
            "COMFYUI_POLL_INTERVAL": "1",
        }
    )
    assert settings == ServerSettings(
        "http://gpu:1", BackendLimits(job_seconds=12.5, max_retries=0, poll_seconds=1)
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COMFYUI_TIMEOUT", "soon"),
        ("COMFYUI_TIMEOUT", "0"),
        ("COMFYUI_TIMEOUT", "inf"),
        ("COMFYUI_TIMEOUT", "nan"),
        ("COMFYUI_MAX_RETRIES", "-1"),
        ("COMFYUI_MAX_RETRIES", "2.5"),
        ("COMFYUI_MAX_RETRIES", "1000"),
        ("COMFYUI_POLL_INTERVAL", "-5"),
    ],
)
def test_a_value_that_makes_no_sense_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidValue, match=name):
        server_settings({name: value})


def test_an_address_without_its_scheme_is_refused() -> None:
    with pytest.raises(InvalidValue, match="localhost:8188"):
        server_settings({"COMFYUI_BASE_URL": "localhost:8188"})
