"""Which containers FFmpeg may open, by the names of its demuxers. Pure.

Left to itself it opens some four hundred, among them playlists and lists of files (HLS, concat,
DASH, image sequences), which read other files of the machine, and descriptions of streams, which
wait on the network. All of these hold what they hold themselves.
"""

from collections.abc import Mapping

DEMUXERS = (
    *("mov", "mp4", "m4a", "3gp", "3g2", "mj2"),  # AVIF and HEIC, too
    *("matroska", "webm", "avi", "flv", "mpegts", "mpeg"),
    # By its name alone, one picture of a file: see below.
    *(
        "image2",
        "gif",
        "apng",
        "png_pipe",
        "jpeg_pipe",
        "webp",
        "webp_pipe",
        "bmp_pipe",
        "tiff_pipe",
    ),
    *("mp3", "wav", "w64", "flac", "ogg", "aac", "aiff"),
)
# For every av.open that reads. A name such as `a%d.png` is that of one file, and of no sequence.
OPEN_OPTIONS: Mapping[str, str] = {"format_whitelist": ",".join(DEMUXERS), "pattern_type": "none"}
