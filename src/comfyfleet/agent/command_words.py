"""Reads a command that an operator gave: its words, with `{port}` and the like filled in. Pure."""

import re
import shlex
from collections.abc import Mapping

from comfyfleet.kernel.errors import InvalidInput

# `${HOME}` is for a shell.
PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")


def command_words(option: str, command: str) -> list[str]:
    """Raises InvalidInput for a command that is empty, or ends within quotes."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InvalidInput(f"{option} can't be read: {error}") from error
    if not words:
        raise InvalidInput(f"{option} is empty")
    return words


def filled_words(option: str, command: str, values: Mapping[str, str]) -> list[str]:
    """The words with each `{name}` replaced by its value, which may have spaces.

    Raises InvalidInput for a name that has no value: it is misspelt, and the program would get it as
    it stands.
    """
    words = command_words(option, command)
    for name in (found for word in words for found in PLACEHOLDER.findall(word)):
        if name not in values:
            known = ", ".join(f"{{{each}}}" for each in values)
            raise InvalidInput(
                f"{option} has {{{name}}}, which is not filled in; known: {known}",
                hint="A program that needs such a text itself can be started by a script.",
            )
    return [PLACEHOLDER.sub(lambda found: values[found[1]], word) for word in words]
