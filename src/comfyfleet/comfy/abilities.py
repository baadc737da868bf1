"""What a backend can do and tell beyond running prompts: not every server can all of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Abilities:
    """A ComfyUI can all of this.

    `describes`: its node types; else `describe` raises NotOffered. `frees`: else `free` does nothing.
    `tells_nodes`: each node's start, steps and end, and which results it reused; else samples.
    `tells_texts`: as outputs. `tells_folders`: whether a file is temporary.
    `tells_parts`: that a prompt would run only in part, so that it is refused.
    `tells_kinds`: of a refused prompt, ComfyUI's own word for what is wrong with it as a whole.
    """

    describes: bool = True
    frees: bool = True
    tells_nodes: bool = True
    tells_texts: bool = True
    tells_folders: bool = True
    tells_parts: bool = True
    tells_kinds: bool = True
