"""Decides which node types an untrusted prompt may use, without access to the database.

The first matching rule decides:

1. Operators deny the type.
2. Operators allow the type.
3. The type is in the list of denied types below.
4. The type is one of ComfyUI's own harmless types (`core_nodes.txt`), so it is allowed.
5. The type is denied if it takes a path, a URL, code or a command from a widget, or calls another
   service.

All other types are unknown. They run only on fleets with `allows_unknown`.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from comfyfleet.api.admin import FleetPrompts, TenantPrompts

CORE_FILE = Path(__file__).with_name("core_nodes.txt")

BACKEND_FOLDER = "It reads a folder of the backend, which may contain other users' files."
SAVES_TO_FOLDER = "It writes to a folder that is set in a widget."
SAVES_MODEL = "It saves a whole model on the backend's disk, where users can't download it."
BROWSER_FILE = "Its widget selects a file of the backend without the checks for uploads."
DEVELOPERS = "It is only used for tests of ComfyUI's editor."
ENDLESS_PATTERN = "Its pattern may run forever, and the backend couldn't be stopped."
OTHER_SERVICE = (
    "It calls another service. An operator can allow it: "
    "comfyfleet admin fleets prompts FLEET --allow TYPE"
)
UNKNOWN = "It isn't one of ComfyUI's own nodes, and no operator has allowed it here."
BY_OPERATOR = "An operator has denied it."

# Patterns of denied node types, each with the reason.
DENIED: Mapping[str, str] = {
    "LoadLatent": BACKEND_FOLDER,
    "LoadImageDataSetFromFolder": BACKEND_FOLDER,
    "LoadImageTextDataSetFromFolder": BACKEND_FOLDER,
    "LoadVideoDataSetFromFolder": BACKEND_FOLDER,
    "LoadVideoTextDataSetFromFolder": BACKEND_FOLDER,
    "LoadTrainingDataset": BACKEND_FOLDER,
    "SaveTrainingDataset": SAVES_TO_FOLDER,
    "SaveImageDataSetToFolder": SAVES_TO_FOLDER,
    "SaveImageTextDataSetToFolder": SAVES_TO_FOLDER,
    "SaveLoRA": SAVES_TO_FOLDER,
    "CheckpointSave": SAVES_MODEL,
    "CLIPSave": SAVES_MODEL,
    "ImageOnlyCheckpointSave": SAVES_MODEL,
    "LoraSave": SAVES_MODEL,
    "ModelSave": SAVES_MODEL,
    "VAESave": SAVES_MODEL,
    "Load3D": BROWSER_FILE,
    "Load3DAdvanced": BROWSER_FILE,
    "RecordAudio": BROWSER_FILE,
    "WebcamCapture": BROWSER_FILE,
    "ComfyMathExpression": "It evaluates an expression from a widget.",
    "GLSLShader": "It compiles code from a widget for the GPU.",
    "StringFormat": "It evaluates a Python format string, which can read any object's attributes.",
    "RegexExtract": ENDLESS_PATTERN,
    "RegexMatch": ENDLESS_PATTERN,
    "RegexReplace": ENDLESS_PATTERN,
    "DevTools*": DEVELOPERS,
}

# Node types that only compute values, but are denied because untrusted users could misuse them.
COMPUTING = (
    "ComfyMathExpression",
    "GLSLShader",
    "RegexExtract",
    "RegexMatch",
    "RegexReplace",
    "StringFormat",
)

# ComfyUI's node types that are allowed although the rules below would deny them, with the reason.
HARMLESS: Mapping[str, str] = {
    "Preview3D": "It only sends the filename back to its client and reads no file.",
}

# A node type is denied if the name of a text widget contains one of these words.
RISKY_WIDGETS: Mapping[str, str] = {
    word: reason
    for words, reason in (
        (
            "path paths file files filename filepath folder dir directory",
            "It takes a path from a widget: {name}.",
        ),
        (
            "url urls uri link host hostname address endpoint server webhook repo repository",
            "It takes an address from a widget: {name}.",
        ),
        (
            "code script python javascript lua expression formula eval exec jinja template lambda "
            "function sql",
            "It takes code from a widget: {name}.",
        ),
        (
            "command cmd shell bash args argv arguments executable program",
            "It takes a command from a widget: {name}.",
        ),
        (
            "token apikey secret password credentials",
            "It takes a key of another service from a widget: {name}.",
        ),
    )
    for word in words.split()
}
# A node type is denied if its own name contains one of these words.
RISKY_TYPES: Mapping[str, str] = {
    word: what
    for words, what in (
        ("eval exec execute python script javascript lua", "code"),
        ("shell bash command cmd terminal subprocess", "a command"),
        ("url http https download downloader webhook ftp", "a URL"),
    )
    for word in words.split()
}
# A node type is denied if its name contains one of these words together with a word of TRANSFERS. A
# name such as "TextAlongPath" is harmless.
RISKY_PLACES = frozenset({"path", "filepath", "folder", "directory", "dir"})
TRANSFERS = frozenset({"load", "save", "read", "write", "from"})
# This widget is harmless, because the prefix is confined to the job's folder before the prompt is
# sent.
PREFIX = "filename_prefix"
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
TEXT = "STRING"
PARTNERS = ("partner/", "api node")


@dataclass(frozen=True, slots=True)
class NodePolicy:
    """The node rules that operators have set for a tenant on a fleet."""

    deny: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    allows_unknown: bool = False

    def refusal(self, class_type: str, info: Mapping[str, Any]) -> str | None:
        """Returns the reason why a node type is denied, or None if it is allowed.

        `info` is the type's entry in object_info.
        """
        if _matches(class_type, self.deny):
            return BY_OPERATOR
        if _matches(class_type, self.allow):
            return None
        reason = default_refusal(class_type, info)
        return None if reason == UNKNOWN and self.allows_unknown else reason


def policy_of(fleet: FleetPrompts, tenant: TenantPrompts) -> NodePolicy:
    return NodePolicy(
        (*fleet.deny, *tenant.deny), (*fleet.allow, *tenant.allow), fleet.allows_unknown
    )


def default_refusal(class_type: str, info: Mapping[str, Any]) -> str | None:
    """Returns the reason why a type is denied if operators have set no rule for it, or None if it
    is allowed.
    """
    listed = next((why for name, why in DENIED.items() if fnmatchcase(class_type, name)), None)
    if listed or class_type in core_nodes() or class_type in HARMLESS:
        return listed
    return _refusal_by_rule(class_type, info) or UNKNOWN


def calls_paid_service(info: Mapping[str, Any]) -> bool:
    """Checks whether a node type is a partner node, which requires the caller's Comfy.org key."""
    return bool(info.get("api_node")) or str(info.get("category", "")).lower().startswith(PARTNERS)


def _refusal_by_rule(class_type: str, info: Mapping[str, Any]) -> str | None:
    if calls_paid_service(info):
        return OTHER_SERVICE
    for name in _text_widgets(info):
        reason = next((RISKY_WIDGETS[word] for word in _words(name) if word in RISKY_WIDGETS), None)
        if reason and name != PREFIX:
            return reason.format(name=name)
    return _refusal_by_name(set(_words(class_type)))


def _refusal_by_name(words: Collection[str]) -> str | None:
    what = next((RISKY_TYPES[word] for word in words if word in RISKY_TYPES), None)
    if what is None and RISKY_PLACES.intersection(words) and TRANSFERS.intersection(words):
        what = "a path"
    return f"Its name suggests that it takes {what}." if what else None


def _text_widgets(info: Mapping[str, Any]) -> Iterator[str]:
    groups = info.get("input")
    for group in ("required", "optional"):
        inputs = groups.get(group) if isinstance(groups, Mapping) else None
        for name, spec in (inputs if isinstance(inputs, Mapping) else {}).items():
            if isinstance(spec, list) and spec and _is_text(spec[0]):
                yield str(name)


def _is_text(kind: Any) -> bool:
    """Checks whether an input accepts a string.

    The input's options are ignored, because even an input that expects a link accepts a value.
    """
    return isinstance(kind, str) and TEXT in kind.split(",")


def _words(name: str) -> Iterator[str]:
    """Splits a name into lowercase words. For example, `loadFromURL` and `load_from_url` both
    become load, from, url.
    """
    return (word.lower() for word in _WORDS.findall(name))


def _matches(class_type: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(class_type, pattern) for pattern in patterns)


@cache
def core_nodes() -> frozenset[str]:
    """Returns the node types of ComfyUI and of the built-in engine that are allowed everywhere."""
    lines = CORE_FILE.read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))
