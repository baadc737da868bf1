"""Files as ComfyUI and its savers write them, made in memory."""

import io
import json
import struct
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import av
from av.audio.stream import AudioStream
from av.video.frame import PictureType
from PIL import Image
from PIL.PngImagePlugin import PngInfo

WORKFLOW: dict[str, Any] = {
    "id": "3f1a",
    "nodes": [
        {
            "id": 3,
            "type": "KSampler",
            "title": 'näch 😀 {["',
            "widgets_values": [7, "fixed", 20, 8.0],
        }
    ],
    "links": [],
    "version": 0.4,
}
PROMPT: dict[str, Any] = {
    "3": {"class_type": "KSampler", "inputs": {"seed": 2**63, "model": ["4", 0]}}
}
TEXTS = {"prompt": json.dumps(PROMPT), "workflow": json.dumps(WORKFLOW)}


def picture() -> Image.Image:
    return Image.new("RGB", (8, 6), "teal")


def encoded(image_format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture().save(file, format=image_format, **options)
    return file.getvalue()


def png(
    texts: dict[str, str] = TEXTS, *, deflated: bool = False, international: bool = False
) -> bytes:
    info = PngInfo()
    for key, text in texts.items():
        if international:
            info.add_itxt(key, text, lang="en", tkey="übersetzt", zip=deflated)
        else:
            info.add_text(key, text, zip=deflated)
    return encoded("PNG", pnginfo=info)


def animated_png() -> bytes:
    """SaveAnimatedPNG: chunks of its own kind behind the first frame."""
    info = PngInfo()
    for key, text in TEXTS.items():
        info.add(b"comf", key.encode() + b"\0" + text.encode(), after_idat=True)
    return encoded(
        "PNG", pnginfo=info, save_all=True, append_images=[Image.new("RGB", (8, 6))], duration=40
    )


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_with(*chunks: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 512, 256, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


def exif(
    *, prompt_tag: int = 0x0110, workflow_tag: int = 0x010F, label: str = "{}:{}"
) -> Image.Exif:
    """SaveAnimatedWEBP: the prompt as the camera's model, the workflow as its make."""
    tags = Image.Exif()
    tags[prompt_tag] = label.format("prompt", TEXTS["prompt"])
    tags[workflow_tag] = label.format("workflow", TEXTS["workflow"])
    return tags


def user_comment(data: bytes) -> Image.Exif:
    tags = Image.Exif()
    tags.get_ifd(0x8769)[0x9286] = data
    return tags


def webp(tags: Image.Exif | None = None) -> bytes:
    return encoded("WEBP", exif=exif() if tags is None else tags)


def animated_webp() -> bytes:
    return encoded(
        "WEBP", exif=exif(), save_all=True, append_images=[Image.new("RGB", (8, 6))], duration=40
    )


def jpeg(tags: Image.Exif | None = None, **options: Any) -> bytes:
    return encoded("JPEG", exif=exif() if tags is None else tags, **options)


def avif() -> bytes:
    return encoded("AVIF", exif=exif(), speed=10)


def video(container_format: str, texts: dict[str, str] = TEXTS, *, tagged: bool = True) -> bytes:
    """SaveVideo and SaveWEBM; untagged as VideoHelperSuite wrote until 2026."""
    file = io.BytesIO()
    options = (
        {"movflags": "use_metadata_tags"} if tagged and container_format in ("mp4", "mov") else {}
    )
    with av.open(file, mode="w", format=container_format, options=options) as container:
        container.metadata.update(texts)
        stream = container.add_stream("libvpx" if container_format == "webm" else "mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        frame = av.VideoFrame(16, 16, "yuv420p")
        frame.pict_type = PictureType.I
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def sound(container_format: str, codec: str, texts: dict[str, str] = TEXTS) -> bytes:
    """SaveAudio, SaveAudioMP3 and SaveAudioOpus."""
    file = io.BytesIO()
    with av.open(file, mode="w", format=container_format) as container:
        container.metadata.update(texts)
        stream = cast(AudioStream, container.add_stream(codec, rate=48000, layout="mono"))
        frame = av.AudioFrame(
            format=stream.format.name, layout="mono", samples=stream.frame_size or 1024
        )
        frame.sample_rate = 48000
        for plane in frame.planes:
            plane.update(bytes(plane.buffer_size))
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def old_helper_suite_comment() -> dict[str, str]:
    return {
        "comment": json.dumps(
            {"prompt": TEXTS["prompt"], "workflow": WORKFLOW, "CreationTime": "2024"}
        )
    }


def box(kind: bytes, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack(">I", 8 + len(body)) + kind + body


def glb(extras: Any = TEXTS) -> bytes:
    """SaveGLB."""
    data = json.dumps(
        {"asset": {"version": "2.0", "extras": extras}, "nodes": [{"mesh": 0}]}
    ).encode()
    data += b" " * (-len(data) % 4)
    chunks = (
        struct.pack("<I4s", len(data), b"JSON") + data + struct.pack("<I4s", 4, b"BIN\0") + bytes(4)
    )
    return struct.pack("<4sII", b"glTF", 2, 12 + len(chunks)) + chunks


def svg() -> bytes:
    """SaveSVGNode."""
    metadata = json.dumps({"prompt": PROMPT, "workflow": WORKFLOW}, indent=2)
    return f"""<?xml version="1.0"?>
<svg xmlns="http://www.w3.org/2000/svg">
  <metadata>
    <![CDATA[
{metadata}
    ]]>
  </metadata>
</svg>""".encode()


def safetensors(metadata: Any = TEXTS) -> bytes:
    """SaveLatent, and the checkpoints that merging saves."""
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"__metadata__": metadata, "latent_tensor": tensor}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


def id3(*frames: bytes, version: int = 3, flags: int = 0) -> bytes:
    body = b"".join(frames)
    size = bytes(len(body) >> shift & 0x7F for shift in (21, 14, 7, 0))
    return b"ID3" + bytes([version, 0, flags]) + size + body + b"\xff\xfb\x90\x00"


SAVED: dict[str, Callable[[], bytes]] = {
    "png": png,
    "png, compressed": lambda: png(deflated=True),
    "png, international": lambda: png(international=True),
    "png, international and compressed": lambda: png(deflated=True, international=True),
    "png, animated": animated_png,
    "png, exif": lambda: encoded("PNG", exif=exif()),
    "webp": webp,
    "webp, animated": animated_webp,
    "jpeg": jpeg,
    "avif": avif,
    "mp4": lambda: video("mp4"),
    "mp4, comment": lambda: video("mp4", old_helper_suite_comment(), tagged=False),
    "mp4, mov": lambda: video("mov"),
    "mp4, mov with a comment": lambda: video("mov", old_helper_suite_comment(), tagged=False),
    "webm": lambda: video("webm"),
    "webm, comment": lambda: video("webm", old_helper_suite_comment()),
    "webm, matroska": lambda: video("matroska"),
    "flac": lambda: sound("flac", "flac"),
    "mp3": lambda: sound("mp3", "libmp3lame"),
    "ogg, opus": lambda: sound("opus", "libopus"),
    "ogg, flac": lambda: sound("ogg", "flac"),
    "glb": glb,
    "svg": svg,
    "safetensors": safetensors,
    "json": lambda: json.dumps(
        {"prompt": PROMPT, "extra_data": {"extra_pnginfo": {"workflow": WORKFLOW}}}
    ).encode(),
}


@cache
def saved(name: str) -> bytes:
    return SAVED[name]()
