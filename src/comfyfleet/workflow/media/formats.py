"""Which kind of file it is, by its first bytes: names and extensions lie."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from comfyfleet.workflow.media import avif, documents, jpeg, matroska, mp3, mp4, png, vorbis, webp
from comfyfleet.workflow.media.limits import Budget
from comfyfleet.workflow.media.span import Span
from comfyfleet.workflow.media.text import Text

# An SVG may have a licence as a comment in front of its first element.
HEAD_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of file that can hold a workflow."""

    kind: str
    title: str
    texts: Callable[[Span, Budget], Iterator[Text]]
    is_it: Callable[[bytes], bool]
    size: Callable[[Span], str] = lambda _: ""


# The first that matches counts: AVIF is a narrower MP4, and safetensors has hardly a signature.
FORMATS = (
    Format("png", "PNG", png.texts, png.is_it, png.size),
    Format("jpeg", "JPEG image", jpeg.texts, jpeg.is_it),
    Format("webp", "WebP image", webp.texts, webp.is_it),
    Format("avif", "AVIF or HEIF image", avif.texts, avif.is_it),
    Format("mp4", "MP4 or MOV video", mp4.texts, mp4.is_it),
    Format("webm", "WebM or Matroska video", matroska.texts, matroska.is_it),
    Format("flac", "FLAC sound", vorbis.flac_texts, vorbis.is_flac),
    Format("ogg", "Ogg or Opus sound", vorbis.ogg_texts, vorbis.is_ogg),
    Format("mp3", "MP3 sound", mp3.texts, mp3.is_it),
    Format("glb", "GLB model", documents.glb_texts, documents.is_glb),
    Format("svg", "SVG drawing", documents.svg_texts, documents.is_svg),
    Format(
        "safetensors", "Safetensors file", documents.safetensors_texts, documents.is_safetensors
    ),
)


def format_of(data: Span) -> Format | None:
    head = data.peek(0, HEAD_BYTES)
    return next((each for each in FORMATS if each.is_it(head)), None)
