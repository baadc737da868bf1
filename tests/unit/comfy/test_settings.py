import pytest

from comfyfleet.comfy.backend import BackendLimits, ComfyuiVariables, comfyui_variables, limits
from comfyfleet.errors import InvalidValue


def test_an_empty_environment_gives_the_defaults() -> None:
    assert comfyui_variables({}) == ComfyuiVariables()
    assert limits({}) == BackendLimits(max_retries=3, poll_seconds=5)


def test_the_environment_sets_address_and_limits() -> None:
    environ = {
        "COMFYUI_BASE_URL": "http://gpu:1",
        "COMFYUI_TIMEOUT": "12.5",
        "COMFYUI_MAX_RETRIES": "0",
        "COMFYUI_POLL_INTERVAL": "1",
        "COMFYUI_SUBMIT_INTERVAL": "2",
    }
    assert comfyui_variables(environ) == ComfyuiVariables("http://gpu:1", 12.5, 0, 1, 2)
    assert limits(environ) == BackendLimits(max_retries=0, poll_seconds=1)


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
        ("COMFYUI_SUBMIT_INTERVAL", "often"),
        ("COMFYUI_BASE_URL", "localhost:8188"),
    ],
)
def test_a_value_that_makes_no_sense_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidValue, match=name):
        comfyui_variables({name: value})
