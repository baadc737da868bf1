"""Why a call was not answered, in words."""

import socket

import httpx
import pytest

from comfyfleet.transport.http import describe_network_error


def caused(error: Exception, *causes: BaseException) -> Exception:
    for outer, inner in zip((error, *causes), causes, strict=False):
        outer.__cause__ = inner
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (caused(httpx.ConnectError("All failed"), ConnectionRefusedError()), "connection refused"),
        (
            caused(
                httpx.ConnectError("All failed"),
                OSError(),
                ExceptionGroup("several", [ConnectionRefusedError(), OSError()]),
            ),
            "connection refused",
        ),
        (caused(httpx.ConnectError("x"), socket.gaierror()), "the host name can't be resolved"),
        (httpx.ReadTimeout(""), "no response before the timeout"),
        (httpx.ConnectError("as it says"), "as it says"),
        (httpx.ReadError(""), "ReadError"),
    ],
)
def test_the_cause_is_told(error: Exception, words: str) -> None:
    assert describe_network_error(error) == words


async def test_a_closed_port_is_a_refused_connection(unused_tcp_port: int) -> None:
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError) as caught:
            await client.get(f"http://127.0.0.1:{unused_tcp_port}/")
    assert describe_network_error(caught.value) == "connection refused"
