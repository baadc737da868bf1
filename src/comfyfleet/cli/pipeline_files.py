"""Saves a pipeline run's candidates as files while the run generates them, with an index and a
contact sheet."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from comfyfleet.cli.control_plane import ApiSession
from comfyfleet.cli.tables import json_text
from comfyfleet.cli.upload import download
from comfyfleet.client import Candidate, PipelineRunHandle
from comfyfleet.client.pipelines import candidate_path
from comfyfleet.errors import FleetError, InvalidInput, missing_extra

if TYPE_CHECKING:
    from PIL.Image import Image


INDEX, SHEET = "index.json", "contact-sheet.png"
CELL_PIXELS, GAP_PIXELS, LABEL_PIXELS = 192, 8, 14
COLUMNS_MAX = 8
PICTURES_MAX = 2000  # maximum number of images on a contact sheet
PAPER, INK = (24, 24, 27), (228, 228, 231)


class ExportedFiles(NamedTuple):
    candidates: int
    index_file: Path
    sheet_file: Path | None  # None if Pillow isn't installed


@dataclass
class ExportFolder:
    """A local folder that receives a run's candidates, in a subfolder named after the run's target
    folder."""

    plane: ApiSession
    handle: PipelineRunHandle
    folder: Path
    status: str | None = None
    _written: set[str] = field(default_factory=set)

    def write_new(self) -> list[tuple[Candidate, Path]]:
        """Saves the candidates that have no local file of the right size yet. Returns all
        candidates."""
        candidates = []
        for candidate in self.plane.iterate(self.handle.candidates(status=self.status)):
            path = path_inside(self.folder, candidate.path)
            if candidate.path not in self._written:
                self._write(candidate, path)
            candidates.append((candidate, path))
        return candidates

    def _write(self, candidate: Candidate, path: Path) -> None:
        is_there = path.exists() and path.stat().st_size == candidate.size
        if candidate.url and not is_there:
            download(self.plane, candidate.url, path)
        self._written.add(candidate.path)

    def finish(self) -> "ExportedFiles":
        """Saves missing files, the index and, if Pillow is installed, the contact sheet."""
        pictures = self.write_new()
        rows = [
            {
                **candidate.model_dump(mode="json"),
                "url": None,
                "file": candidate.path if path.exists() else None,
            }
            for candidate, path in pictures
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        index, sheet = self._index_files()
        index.write_text(json_text({"run": self.handle.run, "candidates": rows}), "utf-8")
        if not has_pillow():
            return ExportedFiles(len(rows), index, None)
        if rows:
            write_sheet(pictures, [step.name for step in self.handle.run.steps], sheet)
        return ExportedFiles(len(rows), index, sheet)

    def _index_files(self) -> tuple[Path, Path]:
        """Returns the paths of the index and the sheet. Their names contain the run's id if another
        run has already used the default names."""
        index, sheet = self.folder / INDEX, self.folder / SHEET
        if not index.exists() or str(self.handle.id) in index.read_text("utf-8"):
            return index, sheet
        end = f"-{self.handle.id}"
        return index.with_stem(index.stem + end), sheet.with_stem(sheet.stem + end)


def path_inside(folder: Path, path: str) -> Path:
    """Returns the local path of a candidate. The path from the control plane must not lead out of
    the folder, not even through a symbolic link."""
    target = candidate_path(folder, path)
    if not target.parent.resolve().is_relative_to(folder.resolve()) or target.is_symlink():
        raise InvalidInput(f"{target} leads out of {folder} through a symbolic link")
    return target


def has_pillow() -> bool:
    return find_spec("PIL") is not None


def pillow_missing() -> FleetError:
    return missing_extra("the contact sheet", "Pillow", "engine")


def write_sheet(
    pictures: Sequence[tuple[Candidate, Path]], steps: Sequence[str], sheet: Path
) -> None:
    """Draws the sheet step by step: a small image of each candidate, with its score and status."""
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
            label = f"{steps[number]}  {candidate.score:.0f}  {candidate.status}"
            if candidate.judge_score is not None:
                label += f"  {candidate.judge_score:.3g}"
            below = (corner[0], corner[1] + CELL_PIXELS)
            draw.text(below, _plain(label), INK)
    paper.save(sheet)


def _plain(label: str) -> str:
    """Replaces letters that are missing from Pillow's built-in font."""
    return label.encode("latin-1", "replace").decode("latin-1")


def _rows(
    pictures: Sequence[tuple[Candidate, Path]], number: int
) -> Iterator[tuple[int, list[tuple[Candidate, Path]]]]:
    mine = [pair for pair in pictures[:PICTURES_MAX] if pair[0].step == number]
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
