"""Images in the forms that /view supports (previews, single channels), and masks that are added to
images. Needs Pillow, and blocks."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, TypeVar

import PIL.Image
from PIL.PngImagePlugin import PngImageFile, PngInfo

from comfyfleet.errors import LimitExceeded, is_full_disk
from comfyfleet.media import Size, measure_picture
from comfyfleet.protocol.payloads import UnforeseenInput

T = TypeVar("T")
# A function that raises an error if a size is too large. It is called before decoding.
CheckSize = Callable[[Size | None], None]

# The only formats that are decoded from untrusted files. Pillow's other decoders are old or run
# external programs.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
PREVIEW_QUALITY = 90
QUALITY_MAX = 100
MASK_COMPRESSION = 4


def shown_picture(
    path: Path, preview: str | None, channel: str | None, check: CheckSize
) -> tuple[bytes, str] | None:
    """Returns the image's bytes and content type, or None if the file itself was requested."""
    if preview is not None:
        return picture_preview(path, preview, channel or "", check)
    if channel == "rgb":
        return without_alpha(path, check), "image/png"
    if channel == "a":
        return alpha_only(path, check), "image/png"
    return None


def picture_preview(
    path: Path, requested: str, channel: str, check: CheckSize
) -> tuple[bytes, str]:
    """Encodes a preview such as `webp;90` or `jpeg;q`. Any other format means webp. Returns the
    bytes and the content type."""
    kind, _, _ = requested.partition(";")
    if kind not in ("webp", "jpeg") or "a" in channel:
        kind = "webp"
    last = requested.split(";")[-1]
    quality = min(int(last[:4]), QUALITY_MAX) if last.isdecimal() else PREVIEW_QUALITY

    def encode(picture: PIL.Image.Image) -> bytes:
        flat = kind == "jpeg" or channel == "rgb"
        shown = picture.convert("RGB") if flat else picture
        buffer = BytesIO()
        shown.save(buffer, format=kind, quality=quality)
        return buffer.getvalue()

    return _with_picture(path, encode, check), f"image/{kind}"


def without_alpha(path: Path, check: CheckSize) -> bytes:
    return _with_picture(path, lambda picture: _png(picture.convert("RGB")), check)


def alpha_only(path: Path, check: CheckSize) -> bytes:
    """Returns a black image with the alpha channel of the original. Without an alpha channel, the
    image is opaque."""

    def encode(picture: PIL.Image.Image) -> bytes:
        opaque = PIL.Image.new("L", picture.size, 255)
        alpha = picture.getchannel("A") if picture.mode == "RGBA" else opaque
        shown = PIL.Image.new("RGBA", picture.size)
        shown.putalpha(alpha)
        return _png(shown)

    return _with_picture(path, encode, check)


def put_mask(mask: BinaryIO, original: Path, path: Path, check: CheckSize) -> None:
    """Writes the original with the alpha channel of the mask. The original's text metadata is
    preserved."""

    def combine(picture: PIL.Image.Image) -> None:
        texts = PngInfo()
        for key, value in picture.text.items() if isinstance(picture, PngImageFile) else ():
            texts.add_text(key, value)
        combined = picture.convert("RGBA")
        with PIL.Image.open(mask, formats=FORMATS) as shape:
            check(shape.size)
            combined.putalpha(shape.convert("RGBA").getchannel("A"))
        combined.save(path, compress_level=MASK_COMPRESSION, pnginfo=texts)

    _with_picture(original, combine, check)


UNREADABLE = (
    LimitExceeded,
    OSError,
    ValueError,
    SyntaxError,
    KeyError,
    OverflowError,
    PIL.Image.DecompressionBombError,
)


def _png(picture: PIL.Image.Image) -> bytes:
    buffer = BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def _with_picture(path: Path, use: Callable[[PIL.Image.Image], T], check: CheckSize) -> T:
    try:
        check(measure_picture(path))
        with PIL.Image.open(path, formats=FORMATS) as picture:
            check(picture.size)
            return use(picture)
    except UNREADABLE as error:
        if is_full_disk(error):
            raise
        raise UnforeseenInput(f"{path.name} can't be displayed as an image: {error}") from error
