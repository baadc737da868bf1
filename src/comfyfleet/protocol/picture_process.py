"""Decodes an untrusted image for /view and for masks in a separate process.

`python -m comfyfleet.protocol.picture_process show FROM TO PIXELS IS_PREVIEW PREVIEW CHANNEL`
writes a file and prints its content type. `mask MASK ORIGINAL TO PIXELS` writes the original with
the alpha channel of the mask. The exit code is 1 if this fails, and ENOSPC if the disk is full.
"""

import errno
import sys
from functools import partial
from pathlib import Path

from comfyfleet.errors import is_full_disk
from comfyfleet.media import require_pixels
from comfyfleet.protocol.payloads import UnforeseenInput
from comfyfleet.protocol.pictures import put_mask, shown_picture
from comfyfleet.protocol.small_picture import limit_process

MEMORY_BYTES_MAX = 1536 * 1024**2
WRITTEN_BYTES_MAX = 512 * 1024**2
CPU_SECONDS_MAX = 25
FAILED = 1


def main(what: str, *words: str) -> int:
    limit_process(MEMORY_BYTES_MAX, CPU_SECONDS_MAX, WRITTEN_BYTES_MAX)
    try:
        return _show(*words) if what == "show" else _mask(*words)
    except (UnforeseenInput, MemoryError):
        return FAILED
    except OSError as error:
        if not is_full_disk(error):
            raise
        return errno.ENOSPC


def _show(
    source: str, to: str, pixels_max: str, is_preview: str, preview: str, channel: str
) -> int:
    check = partial(require_pixels, pixels_max=int(pixels_max))
    shown = shown_picture(Path(source), preview if is_preview else None, channel or None, check)
    if shown is None:
        return FAILED
    content, kind = shown
    Path(to).write_bytes(content)
    sys.stdout.write(kind)
    return 0


def _mask(mask: str, original: str, to: str, pixels_max: str) -> int:
    check = partial(require_pixels, pixels_max=int(pixels_max))
    with Path(mask).open("rb") as file:
        put_mask(file, Path(original), Path(to), check)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
