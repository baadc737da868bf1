"""Creates a thumbnail for a gallery in a separate process: `python -m
comfyfleet.protocol.small_picture FROM TO PIXELS`.

The image is untrusted, so this process has no key and no connection, and its memory, time and
output are limited. It needs Pillow. The exit code is 0 once the thumbnail is written, 1 if no
thumbnail can be created, and ENOSPC if the disk is full.
"""

import contextlib
import errno
import os
import sys
from pathlib import Path

import PIL.Image
import PIL.ImageOps

from comfyfleet.errors import LimitExceeded, is_full_disk
from comfyfleet.media import measure_picture, require_pixels

SIDE_PIXELS_MAX = 512
QUALITY = 80
FORMATS = ("PNG", "JPEG", "WEBP")
# Other modes lose information when they are converted to 8-bit RGB, so those images are shown
# without a thumbnail.
MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA"})
COLOUR_PROFILE_BYTES_MAX = 16 * 1024
MEMORY_BYTES_MAX = 768 * 1024**2
SMALL_BYTES_MAX = 256 * 1024
CPU_SECONDS_MAX = 10
NO_SMALL_PICTURE = 1


def shrink_picture(path: Path, to: Path, *, pixels_max: int) -> bool:
    """Writes the image as WebP, with no side longer than `SIDE_PIXELS_MAX`. Returns False if this
    would visibly change the image, for example by losing its animation."""
    require_pixels(measure_picture(path), pixels_max)
    with PIL.Image.open(path, formats=FORMATS) as picture:
        require_pixels(picture.size, pixels_max)
        if picture.mode not in MODES or getattr(picture, "is_animated", False):
            return False
        # Makes the decoder scale a JPEG down while it decodes.
        picture.draft("RGB", (SIDE_PIXELS_MAX, SIDE_PIXELS_MAX))
        mode = "RGBA" if picture.has_transparency_data else "RGB"
        profile = picture.info.get("icc_profile") or b""
        if len(profile) > COLOUR_PROFILE_BYTES_MAX:
            return False
        turned = PIL.ImageOps.exif_transpose(_shrunk(picture, mode))
        turned.save(to, "WEBP", quality=QUALITY, icc_profile=profile, exif=b"")
    return True


def _shrunk(picture: PIL.Image.Image, mode: str) -> PIL.Image.Image:
    plain = picture if picture.mode == mode else picture.convert(mode)
    orientation = picture.getexif()
    plain.thumbnail((SIDE_PIXELS_MAX, SIDE_PIXELS_MAX), reducing_gap=2.0)
    plain.info["exif"] = orientation.tobytes()
    return plain


def limit_process(memory_bytes: int, cpu_seconds: int, written_bytes: int) -> None:
    """Limits the resources of this process. Call this after all imports, because memory that is
    already in use isn't counted. On systems that don't support these limits, only the limits for
    time and pixels apply."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[5])
        memory = pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        resource.setrlimit(resource.RLIMIT_FSIZE, (written_bytes, written_bytes))


UNREADABLE = (
    LimitExceeded,
    OSError,
    ValueError,
    SyntaxError,
    KeyError,
    IndexError,
    OverflowError,
    MemoryError,
    TypeError,
    PIL.Image.DecompressionBombError,
)


def main(source: str, to: str, pixels_max: str) -> int:
    limit_process(MEMORY_BYTES_MAX, CPU_SECONDS_MAX, SMALL_BYTES_MAX)
    try:
        is_made = shrink_picture(Path(source), Path(to), pixels_max=int(pixels_max))
    except UNREADABLE as error:
        return errno.ENOSPC if is_full_disk(error) else NO_SMALL_PICTURE
    return 0 if is_made else NO_SMALL_PICTURE


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
