"""An inspection as tables for people."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from comfyfleet.cli.listing import Listing
from comfyfleet.cli.world import printable
from comfyfleet.workflow.inspection.model import (
    Inspection,
    Made,
    Missing,
    NamedFile,
    NodeRef,
    Taken,
    UsedPack,
)

# So that an inspection fits a few screens; --all and --json show everything.
ROWS_MAX = 40
NAMES_MAX = 6
VALUE_CHARACTERS_MAX = 100
CHOICES_SHOWN_MAX = 3
LIMIT_SHOWN_MAX = 2**31


class Section:
    """A heading, and a table under it that keeps to its maximum of rows."""

    def __init__(self, title: str, *columns: str, rows_max: int | None) -> None:
        self._title = title
        self._rows_max = rows_max
        self._left_out = 0
        self._listing = Listing(columns, indent=2)

    def add(self, *cells: str | Text) -> None:
        if self._rows_max is not None and len(self._listing.rows) >= self._rows_max:
            self._left_out += 1
            return
        self._listing.add(*cells)

    def shown(self, *remarks: str) -> RenderableType:
        more = [f"… and {self._left_out} more (--all shows them)"] if self._left_out else []
        lines = [plain(f"  {remark}", "dim") for remark in (*more, *remarks)]
        heading = Text(self._title, style="bold")
        return Group(heading, self._listing, *lines, Text())


def plain(text: str, style: str = "") -> Text:
    """As it is: brackets in a title are no markup."""
    return Text(printable(text), style=style)


def sections(found: Inspection, *, everything: bool) -> Iterator[RenderableType]:
    rows_max = None if everything else ROWS_MAX
    yield from _takes(found.takes, everything=everything)
    yield from _makes(found.makes, rows_max)
    yield from _files(found.files, rows_max)
    yield from _packs(found, rows_max)
    yield from _parts(found, rows_max)
    if found.missing is not None:
        yield _missing(found.missing, rows_max)


def _takes(takes: Sequence[Taken], *, everything: bool) -> Iterator[RenderableType]:
    chosen = [each for each in takes if everything or _matters(each)] or list(takes)
    if not chosen:
        return
    rows_max = None if everything else ROWS_MAX
    section = Section("Takes", "set with", "or", "value", "node", "type", rows_max=rows_max)
    for each in chosen:
        section.add(
            plain(each.address or "–", "cyan"),
            f"--{each.shorthands[0]}" if each.shorthands else "",
            _shortened(each.value),
            _node_name(each.node, each.exposed_as),
            _type_name(each),
        )
    rest = len(takes) - len(chosen)
    yield section.shown(*([f"and {rest} other values (--all shows them)"] if rest else []))


def _matters(taken: Taken) -> bool:
    if taken.shorthands or taken.exposed_as is not None:
        return True
    return taken.role in ("file", "text", "seed", "size", "steps")


def _makes(makes: Sequence[Made], rows_max: int | None) -> Iterator[RenderableType]:
    if not makes:
        yield Group(Text("Makes nothing: no node saves or shows a result.", style="bold"), Text())
        return
    section = Section("Makes", "node", "media", "", "kept as", rows_max=rows_max)
    for each in makes:
        kept = each.file_name_prefix or "yes" if each.saved else "only shown"
        section.add(each.node.id, each.media, _node_name(each.node), kept)
    yield section.shown()


def _files(files: Sequence[NamedFile], rows_max: int | None) -> Iterator[RenderableType]:
    if not files:
        return
    section = Section("Names these files", "kind", "", "file", "used by", rows_max=rows_max)
    for each in files:
        section.add(each.kind, _file_state(each), _file_name(each), _listed(each.addresses))
    yield section.shown()


def _packs(found: Inspection, rows_max: int | None) -> Iterator[RenderableType]:
    section = Section("Needs these nodes", "pack", "version", "node types", rows_max=rows_max)
    counts = {each.class_type: each.count for each in found.node_types}
    for pack in _with_unknown_pack(found):
        names = sorted(pack.node_types, key=lambda name: -counts.get(name, 0))
        section.add(pack.name, _listed(pack.versions, most=2), _counted(names, counts, rows_max))
    if found.node_types:
        yield section.shown()


def _with_unknown_pack(found: Inspection) -> Iterator[UsedPack]:
    yield from found.packs
    unknown = tuple(each.class_type for each in found.node_types if each.pack is None)
    if unknown:
        yield UsedPack("not named", (), unknown)


def _counted(names: Sequence[str], counts: dict[str, int], rows_max: int | None) -> str:
    shown = [f"{name} ×{counts[name]}" if counts.get(name, 1) > 1 else name for name in names]
    return _listed(shown, most=len(shown) if rows_max is None else 2 * NAMES_MAX)


def _parts(found: Inspection, rows_max: int | None) -> Iterator[RenderableType]:
    yield from _groups(found, rows_max)
    yield from _subgraphs(found, rows_max)
    yield from _chains(found, rows_max)
    yield from _switched_off(found, rows_max)


def _groups(found: Inspection, rows_max: int | None) -> Iterator[RenderableType]:
    section = Section("Groups", "title", "nodes", "", rows_max=rows_max)
    for each in found.groups:
        where = f"in subgraph {each.subgraph}" if each.subgraph else ""
        section.add(each.title, str(each.nodes), where)
    if found.groups:
        yield section.shown()


def _subgraphs(found: Inspection, rows_max: int | None) -> Iterator[RenderableType]:
    columns = ("name", "instances", "nodes", "takes", "gives")
    section = Section("Subgraphs", *columns, rows_max=rows_max)
    for each in found.subgraphs:
        counts = (str(each.instances), str(each.nodes))
        section.add(each.name, *counts, _listed(each.inputs), _listed(each.outputs))
    if found.subgraphs:
        yield section.shown()


def _chains(found: Inspection, rows_max: int | None) -> Iterator[RenderableType]:
    section = Section("Chains", "name", "segments", "", "off already", rows_max=rows_max)
    for each in found.chains:
        titles = f"{each.segments[0]} to {each.segments[-1]}" if each.segments else ""
        section.add(each.name, str(len(each.segments)), titles, _listed(each.off))
    if found.chains:
        yield section.shown("comfyfleet convert --segments N keeps the first N")


def _switched_off(found: Inspection, rows_max: int | None) -> Iterator[RenderableType]:
    section = Section("Switched off", "node", "", "", rows_max=rows_max)
    for off in found.switched_off:
        section.add(off.node.id, _node_name(off.node), off.how)
    for shell in found.dead_shells:
        words = "dead shell: all in its subgraph is switched off, it can make nothing"
        section.add(shell.id, _node_name(shell), words)
    if found.switched_off or found.dead_shells:
        yield section.shown()


def _missing(missing: Missing, rows_max: int | None) -> RenderableType:
    if not missing:
        return Text("Nothing of that is missing on the server.", style="green")
    section = Section("Missing on the server", "what", "where", "", rows_max=rows_max)
    for each in missing.node_types:
        pack = f"from {each.pack}" if each.pack else "the file doesn't name its pack"
        where = _listed([ref.id for ref in each.nodes])
        section.add("node type", where, f"{each.class_type}, {pack}")
    for value in missing.values:
        closest = f"; closest: {_listed(value.closest)}" if value.closest else ""
        section.add("value", value.address, value.problem + closest)
    for lost in missing.inputs:
        section.add("input", lost.node.id, f"{lost.node.class_type} has no {lost.input} any more")
    for file in missing.files:
        section.add("input file", "", f"{file}: upload it before running")
    return section.shown()


def _node_name(node: NodeRef, exposed_as: str | None = None) -> str:
    return exposed_as or " › ".join((*node.path, node.title))


def _type_name(taken: Taken) -> str:
    if taken.role == "file":
        return "file"
    if taken.choices is not None:
        names = [str(choice) for choice in taken.choices]
        return f"one of {_listed(names, most=CHOICES_SHOWN_MAX)}" if names else "an empty list"
    return f"{taken.type} {_range(taken)}".strip()


def _range(taken: Taken) -> str:
    """Limits that no one reaches (2^64 of a seed) tell nothing."""
    least = taken.min if taken.min is not None and abs(taken.min) < LIMIT_SHOWN_MAX else None
    most = taken.max if taken.max is not None and abs(taken.max) < LIMIT_SHOWN_MAX else None
    if least is None:
        return "" if most is None else f"up to {most:g}"
    return f"from {least:g}" if most is None else f"{least:g} – {most:.10g}"


def _shortened(value: Any) -> str:
    """On one line, and as JSON writes it: that is how it is set."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= VALUE_CHARACTERS_MAX else f"{text[:VALUE_CHARACTERS_MAX]}…"


def _file_name(file: NamedFile) -> str:
    return f"{file.directory}/{file.name}" if file.directory else file.name


def _file_state(file: NamedFile) -> Text:
    if not file.active:
        return Text("switched off", style="dim")
    if file.present is False:
        return Text("missing", style="red")
    return Text("there", style="green") if file.present else Text("")


def _listed(names: Iterable[str], *, most: int = NAMES_MAX) -> str:
    names = list(names)
    more = f" … {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
