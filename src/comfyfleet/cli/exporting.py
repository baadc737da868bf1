"""A run's candidates as files, with an index and a contact sheet."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from comfyfleet.cli.admin.client import Control
from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.kernel.extras import missing_extra

if TYPE_CHECKING:
    from PIL.Image import Image

INDEX, SHEET = "index.json", "contact-sheet.png"
PAGE = 100
CELL_PIXELS, GAP_PIXELS, LABEL_PIXELS = 192, 8, 14
COLUMNS_MAX = 8
PICTURES_MAX = 2000  # on one sheet
PAPER, INK = (24, 24, 27), (228, 228, 231)


class Exported(NamedTuple):
    candidates: int
    index_file: Path
    sheet_file: Path


def exported(
    plane: Control, run: Mapping[str, Any], folder: Path, *, status: str | None = None
) -> Exported:
    """Files that are there in their size already are not fetched again."""
    require_pillow()
    rows = []
    for each in _candidates(plane, run["id"], status):
        path = _inside(folder, each["path"])
        if each["url"] and not (path.exists() and path.stat().st_size == each["size"]):
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(path.name + ".part")
            plane.download(each["url"], part)
            part.replace(path)
        rows.append({**each, "url": None, "file": each["path"] if path.exists() else None})
    folder.mkdir(parents=True, exist_ok=True)
    index, sheet = folder / INDEX, folder / SHEET
    steps = [each["name"] for each in run["steps"]]
    text = json.dumps({"run": run, "candidates": rows}, indent=2, ensure_ascii=False)
    index.write_text(text, "utf-8")
    if rows:
        write_sheet([(each, folder / each["path"]) for each in rows], steps, sheet)
    return Exported(len(rows), index, sheet)


def _candidates(plane: Control, run_id: str, status: str | None) -> Iterator[dict[str, Any]]:
    after = None
    while True:
        page = plane.get(
            "pipeline-runs", run_id, "candidates", after=after, status=status, limit=PAGE
        )
        yield from page["candidates"]
        after = page["next"]
        if after is None:
            return


def _inside(folder: Path, path: str) -> Path:
    """The control plane's word is not trusted with our disk."""
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or path.startswith("/"):
        raise InvalidInput(f"a candidate's path leads out of the folder: {path!r}")
    return folder.joinpath(*parts)


def require_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise missing_extra("the contact sheet", "Pillow", "engine") from None


def write_sheet(
    pictures: Sequence[tuple[Mapping[str, Any], Path]], steps: Sequence[str], sheet: Path
) -> None:
    """Step by step, each picture small, with its score and how it was judged."""
    from PIL import Image, ImageDraw

    rows = [row for number in range(len(steps)) for row in _rows(pictures, number)]
    widest = max(len(row) for _, row in rows)
    height = CELL_PIXELS + LABEL_PIXELS + GAP_PIXELS
    size = (widest * (CELL_PIXELS + GAP_PIXELS) + GAP_PIXELS, len(rows) * height + GAP_PIXELS)
    paper = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(paper)
    for y, (number, row) in enumerate(rows):
        for x, (candidate, path) in enumerate(row):
            corner = (GAP_PIXELS + x * (CELL_PIXELS + GAP_PIXELS), GAP_PIXELS + y * height)
            small = _small(path)
            if small:
                paper.paste(small, corner)
            label = f"{steps[number]}  {candidate['score']:.0f}  {candidate['status']}"
            below = (corner[0], corner[1] + CELL_PIXELS)
            draw.text(below, _plain(label), INK)
    paper.save(sheet)


def _plain(label: str) -> str:
    """The font that comes with Pillow has no more letters."""
    return label.encode("latin-1", "replace").decode("latin-1")


def _rows(
    pictures: Sequence[tuple[Mapping[str, Any], Path]], number: int
) -> Iterator[tuple[int, list[tuple[Mapping[str, Any], Path]]]]:
    mine = [each for each in pictures[:PICTURES_MAX] if each[0]["step"] == number]
    for start in range(0, len(mine), COLUMNS_MAX):
        yield number, mine[start : start + COLUMNS_MAX]


def _small(path: Path) -> "Image | None":
    from PIL import Image

    try:
        with Image.open(path) as picture:
            small = picture.convert("RGB")
    except (OSError, ValueError):
        return None
    small.thumbnail((CELL_PIXELS, CELL_PIXELS))
    return small
