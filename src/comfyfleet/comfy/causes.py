"""Why a call was not answered, in words for people."""

import socket

import httpx

CHAIN_MAX = 10
_WORDS: tuple[tuple[type[BaseException], str], ...] = (
    (ConnectionRefusedError, "connection refused"),
    (ConnectionResetError, "the connection was cut"),
    (socket.gaierror, "its name can't be resolved"),
    (httpx.ConnectTimeout, "no connection within the time allowed"),
    (httpx.TimeoutException, "no answer within the time allowed"),
    (TimeoutError, "no answer within the time allowed"),
    (httpx.RemoteProtocolError, "the connection was closed without an answer"),
)


def in_words(error: BaseException) -> str:
    """By the first cause that we have words for; else as it says itself."""
    for each in _chain(error):
        for kind, words in _WORDS:
            if isinstance(each, kind):
                return words
    return str(error) or type(error).__name__


def _chain(error: BaseException) -> list[BaseException]:
    """The error, what caused it, and so on; of a group the first."""
    found: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and len(found) < CHAIN_MAX:
        found.append(each)
        inside = each.exceptions[0] if isinstance(each, BaseExceptionGroup) else None
        each = inside or each.__cause__ or each.__context__
    return found
