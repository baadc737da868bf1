"""What a value is, judged by its name: file names, and words in the names of inputs and classes."""

import re
from collections.abc import Iterator
from typing import Any

from comfyfleet.workflow.inspection.model import Media

MODEL_SUFFIXES = (
    ".safetensors", ".sft", ".ckpt", ".pt", ".pt2", ".pth", ".bin", ".pkl", ".gguf", ".onnx",
    ".engine",
)  # fmt: skip
MEDIA_SUFFIXES = (
    ".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".exr", ".svg",
    ".mp4", ".webm", ".mov", ".mkv", ".avi", ".m4v",
    ".wav", ".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac",
    ".glb", ".gltf", ".obj", ".fbx", ".stl", ".ply", ".spz", ".splat", ".latent",
)  # fmt: skip
FILE_NAME_CHARACTERS_MAX = 500
# A file in the output or temp folder is named with its folder behind it: `cat.png [output]`.
_FOLDER = re.compile(r" \[(?:input|output|temp)\]$")
_EMBEDDING = re.compile(r"embedding:([^\s,()\[\]{}<>|:]+)")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+D?")
# First match wins: SaveAnimatedWEBP takes pictures, and makes one moving one of them.
MEDIA_WORDS: tuple[tuple[Media, frozenset[str]], ...] = (
    ("animation", frozenset(("animated", "gif", "apng"))),
    ("video", frozenset(("video", "videos", "webm", "mp4"))),
    ("audio", frozenset(("audio", "sound", "music", "speech", "mp3", "flac", "opus"))),
    ("3d", frozenset(("3d", "glb", "gltf", "mesh", "splat", "voxel"))),
    ("text", frozenset(("text", "string", "json", "any"))),
    ("latent", frozenset(("latent", "latents"))),
    ("image", frozenset(("image", "images", "mask", "masks", "picture", "svg", "png", "jpg"))),
)


def is_model_file(value: Any) -> bool:
    """A prompt that ends with the name of an embedding is none."""
    return _has_suffix(value, MODEL_SUFFIXES) and not _EMBEDDING.search(value)


def is_media_file(value: Any) -> bool:
    return isinstance(value, str) and _has_suffix(_FOLDER.sub("", value), MEDIA_SUFFIXES)


def embeddings_in(text: str) -> Iterator[str]:
    for match in _EMBEDDING.finditer(text):
        yield match[1]


def words_of(name: str) -> frozenset[str]:
    return frozenset(word.lower() for word in _WORD.findall(name))


def media_named(name: str) -> Media | None:
    words = words_of(name)
    return next((media for media, hints in MEDIA_WORDS if words & hints), None)


def _has_suffix(value: Any, suffixes: tuple[str, ...]) -> bool:
    return (
        isinstance(value, str)
        and len(value) <= FILE_NAME_CHARACTERS_MAX
        and "\n" not in value
        and value.lower().endswith(suffixes)
    )
