"""Which local files a prompt needs, and for which of its inputs. They are looked at, not opened."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comfyfleet.cli.files import need_file
from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.workflow.inspection import Inspection, inspect
from comfyfleet.workflow.media import Opened
from comfyfleet.workflow.model import Prompt
from comfyfleet.workflow.setting import (
    Assignment,
    ExposedInput,
    Place,
    find_input,
    set_values,
    shorthand_places,
)

MEDIA = ("image", "video", "audio")
INPUT_ANNOTATION = " [input]"
OTHER_ANNOTATIONS = (" [output]", " [temp]")
PLACES_SHOWN_MAX = 8


@dataclass(frozen=True, slots=True)
class Given:
    """A file for an input that is named as `node.input`, or by its own name if no other has it."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class Upload:
    """`places` take the name under which the backend has it."""

    path: Path
    places: tuple[Place, ...]

    def __str__(self) -> str:
        return f"{self.path} for {', '.join(map(_address, self.places))}"


@dataclass(frozen=True, slots=True)
class Inputs:
    """`missing` are file names that neither lie here nor are known to the server."""

    uploads: tuple[Upload, ...] = ()
    missing: tuple[str, ...] = ()


def parse_given(text: str) -> Given:
    name, equals, path = text.partition("=")
    if not equals or not name.strip() or not path:
        raise InvalidInput(
            f"--input {text!r} gives no file: write NAME=FILE, such as image=cat.png or 3.image=cat.png"
        )
    return Given(name.strip(), Path(path))


def find_inputs(
    prompt: Prompt,
    object_info: Mapping[str, Any],
    *,
    given: Sequence[Given] = (),
    media: Mapping[str, Path],
    beside: Path | None,
    exposed: Sequence[ExposedInput] = (),
) -> Inputs:
    """Files given by name or kind, and those that the prompt names and that lie in `beside`."""
    found = inspect(Opened("json", None, prompt), object_info)
    places: dict[Place, Path] = {}
    for kind, path in media.items():
        for place in _places_of_kind(prompt, object_info, kind):
            places[place] = need_file(path)
    for each in given:
        path = need_file(each.path)
        if "." in each.name:
            named_places = find_input(prompt, object_info, each.name, exposed)
        else:
            named_places = (_file_place(found, each.name),)
        places.update(dict.fromkeys(named_places, path))
    named = list(_files_named(found, places))
    local = {name: _inside(beside, name) for name, _, _ in named}
    places |= {place: lies for name, place, _ in named if (lies := local[name])}
    missing = [name for name, _, present in named if local[name] is None and present is False]
    return Inputs(_grouped(places), tuple(dict.fromkeys(missing)))


def with_names(
    prompt: Prompt, object_info: Mapping[str, Any], names: Iterable[tuple[Upload, str]]
) -> Prompt:
    """The prompt with the names under which the backend has the files."""
    assignments = [
        Assignment(_address(place), name) for upload, name in names for place in upload.places
    ]
    return set_values(prompt, object_info, assignments, check=False).prompt


def is_file_place(
    prompt: Prompt,
    object_info: Mapping[str, Any],
    address: str,
    exposed: Sequence[ExposedInput] = (),
) -> bool:
    """Whether that input takes a file that can be uploaded."""
    places = find_input(prompt, object_info, address, exposed)
    found = inspect(Opened("json", None, prompt), object_info)
    return any(Place(one.node.id, one.input or "") in places for one in _takes_files(found))


def _places_of_kind(prompt: Prompt, object_info: Mapping[str, Any], kind: str) -> tuple[Place, ...]:
    places = shorthand_places(prompt, object_info, kind)
    if not places:
        raise InvalidInput(f"--{kind}: no node of the workflow loads one")
    values = [prompt[place.node_id]["inputs"].get(place.input) for place in places]
    if any(value != values[0] for value in values):
        shown = ", ".join(f"{_address(p)} (now {v})" for p, v in zip(places, values, strict=True))
        raise InvalidInput(
            f"--{kind}: several could be meant: {shown}",
            hint=f"Name one: --input {_address(places[0])}=FILE",
        )
    return places


def _file_place(found: Inspection, name: str) -> Place:
    files = [Place(one.node.id, one.input or "") for one in _takes_files(found)]
    places = [place for place in files if place.input == name]
    if len(places) == 1:
        return places[0]
    problem = "several inputs have that name" if places else "no input for a file has that name"
    shown = ", ".join(map(_address, (places or files)[:PLACES_SHOWN_MAX])) or "there is none"
    raise InvalidInput(
        f"--input {name}: {problem}; inputs that take files: {shown}",
        hint="Name one as NODE.INPUT=FILE, where NODE is its id or title.",
    )


def _takes_files(found: Inspection) -> Iterator[Any]:
    return (one for one in found.takes if one.role == "file" and one.input is not None)


def _files_named(
    found: Inspection, settled: Mapping[Place, Path]
) -> Iterator[tuple[str, Place, bool | None]]:
    for file in found.files:
        if file.kind != "input" or not file.active or file.name.endswith(OTHER_ANNOTATIONS):
            continue
        for address in file.addresses:
            node_id, _, name = address.partition(".")
            if Place(node_id, name) not in settled:
                yield file.name, Place(node_id, name), file.present


def _inside(folder: Path | None, name: str) -> Path | None:
    """Only what lies in the folder: a workflow of others must not fetch files from anywhere else."""
    if folder is None:
        return None
    path = folder / name.removesuffix(INPUT_ANNOTATION).replace("\\", "/")
    try:
        inside = path.resolve().is_relative_to(folder.resolve()) and path.is_file()
    except (OSError, ValueError):
        return None
    return path if inside else None


def _grouped(places: Mapping[Place, Path]) -> tuple[Upload, ...]:
    """A file that several inputs name is uploaded once."""
    by_path: dict[Path, tuple[Place, ...]] = {}
    for place, path in places.items():
        by_path[path] = (*by_path.get(path, ()), place)
    return tuple(Upload(path, found) for path, found in by_path.items())


def _address(place: Place) -> str:
    return f"{place.node_id}.{place.input}"
