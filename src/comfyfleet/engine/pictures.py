"""Pictures for viewers: smaller, without alpha, alpha alone; and masks put into originals."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, TypeVar

import PIL.Image
from PIL.PngImagePlugin import PngImageFile, PngInfo

from comfyfleet.engine.decode import size_told
from comfyfleet.engine.limits import require_small
from comfyfleet.engine.trouble import Trouble
from comfyfleet.kernel.errors import LimitExceeded

T = TypeVar("T")

PREVIEW_QUALITY = 90
MASK_COMPRESSION = 4


def preview(path: Path, wanted: str, channel: str) -> tuple[bytes, str]:
    """`webp;90` or `jpeg;q` as bytes, and the content type; any other format is webp."""
    kind, _, _ = wanted.partition(";")
    if kind not in ("webp", "jpeg") or "a" in channel:
        kind = "webp"
    last = wanted.split(";")[-1]
    quality = int(last) if last.isdecimal() else PREVIEW_QUALITY

    def encode(picture: PIL.Image.Image) -> bytes:
        flat = kind == "jpeg" or channel == "rgb"
        shown = picture.convert("RGB") if flat else picture
        buffer = BytesIO()
        shown.save(buffer, format=kind, quality=quality)
        return buffer.getvalue()

    return _with_picture(path, encode), f"image/{kind}"


def without_alpha(path: Path) -> bytes:
    return _with_picture(path, lambda picture: _png(picture.convert("RGB")))


def alpha_only(path: Path) -> bytes:
    """Black, with the alpha of the picture; a picture without alpha is opaque."""

    def encode(picture: PIL.Image.Image) -> bytes:
        opaque = PIL.Image.new("L", picture.size, 255)
        alpha = picture.getchannel("A") if picture.mode == "RGBA" else opaque
        shown = PIL.Image.new("RGBA", picture.size)
        shown.putalpha(alpha)
        return _png(shown)

    return _with_picture(path, encode)


def put_mask(mask: BinaryIO, original: Path, path: Path) -> None:
    """Write the original with the alpha of the mask, keeping the texts it carries."""

    def combine(picture: PIL.Image.Image) -> None:
        texts = PngInfo()
        for key, value in picture.text.items() if isinstance(picture, PngImageFile) else ():
            texts.add_text(key, value)
        combined = picture.convert("RGBA")
        with PIL.Image.open(mask) as shape:
            require_small(shape.size)
            combined.putalpha(shape.convert("RGBA").getchannel("A"))
        combined.save(path, compress_level=MASK_COMPRESSION, pnginfo=texts)

    _with_picture(original, combine)


def _png(picture: PIL.Image.Image) -> bytes:
    buffer = BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def _with_picture(path: Path, use: Callable[[PIL.Image.Image], T]) -> T:
    try:
        require_small(size_told(path))
        with PIL.Image.open(path) as picture:
            require_small(picture.size)
            return use(picture)
    except (LimitExceeded, OSError, ValueError, SyntaxError, KeyError) as error:
        raise Trouble(f"{path.name} can't be shown as a picture: {error}") from error
