"""Prints answers and inspections as tables (fitted to the terminal, with full values elsewhere), or
as JSON for programs."""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from comfyfleet.cli.context import CliContext, printable
from comfyfleet.workflow.inspect.results import (
    InspectedInput,
    InspectedOutput,
    Inspection,
    MissingParts,
    NamedFile,
    NodeRef,
    UsedPack,
)

GAP_CHARACTERS = 2
# Minimum width of a shortened column. If the table still doesn't fit, columns are left out.
SHORTENED_CHARACTERS_MIN = 10
# Maximum width to which columns are padded when the output is piped. A longer cell shifts only its
# own row.
PADDED_CHARACTERS_MAX = 60
ELLIPSIS = "…"
_UNITS = (("day", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
DAYS_RELATIVE_MAX = 30


@dataclass
class TextTable:
    """A table. Words are never broken; a cell that doesn't fit is shortened.

    If a terminal is still too narrow, the last columns are left out, with a note. The first column
    is what people copy, so it is never shortened."""

    headings: Sequence[str]
    right: Collection[str] = ()
    indent: int = 0
    rows: list[tuple[Text, ...]] = field(default_factory=list)

    def add(self, *cells: str | Text) -> None:
        self.rows.append(tuple(map(_one_line, cells)))

    def print_on(self, console: Console) -> None:
        console.print(self, soft_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        headings = tuple(Text(heading, style="dim") for heading in self.headings)
        lines = [headings, *self.rows] if any(self.headings) else self.rows
        widths = [
            max((row[column].cell_len for row in lines), default=0)
            for column in range(len(self.headings))
        ]
        if console.is_terminal:
            shown = fit_columns(widths, options.max_width - self.indent)
        else:
            shown = {at: min(width, PADDED_CHARACTERS_MAX) for at, width in enumerate(widths)}
        for row in lines:
            yield self._line(row, shown, shorten=console.is_terminal)
        left_out = [name for at, name in enumerate(self.headings) if at not in shown and name]
        if left_out:
            yield Text(
                f"hidden because the terminal is too narrow: {', '.join(left_out)}", style="dim"
            )

    def _line(self, row: Sequence[Text], shown: Mapping[int, int], *, shorten: bool) -> Text:
        line = Text(" " * self.indent)
        for at, width in shown.items():
            cell = _shortened(row[at], width) if shorten else row[at]
            blank = Text(" " * max(0, width - cell.cell_len))
            parts = (blank, cell) if self.headings[at] in self.right else (cell, blank)
            line += Text.assemble(*parts, " " * GAP_CHARACTERS)
        line.rstrip()
        return line


def fit_columns(widths: Sequence[int], most: int) -> dict[int, int]:
    """Returns the columns that fit in `most` characters, with their widths. The widest columns are
    narrowed first."""
    shown = dict(enumerate(widths))
    while len(shown) > 1:
        room = most - GAP_CHARACTERS * (len(shown) - 1)
        floors = {
            at: width if at == 0 else min(width, SHORTENED_CHARACTERS_MIN)
            for at, width in shown.items()
        }
        if sum(floors.values()) <= room:
            return _narrowed(shown, floors, room)
        shown.popitem()
    return shown


def _narrowed(widths: dict[int, int], floors: Mapping[int, int], room: int) -> dict[int, int]:
    for _ in range(sum(widths.values()) - room):
        widest = max(
            (at for at in widths if widths[at] > floors[at]), key=lambda at: (widths[at], at)
        )
        widths[widest] -= 1
    return widths


def _one_line(cell: str | Text) -> Text:
    text = cell if isinstance(cell, Text) else Text(printable(cell))
    return Text(" ".join(text.plain.splitlines()), style=text.style)


def _shortened(cell: Text, width: int) -> Text:
    if cell.cell_len <= width:
        return cell
    beginning = set_cell_size(cell.plain, max(0, width - cell_len(ELLIPSIS))).rstrip()
    return Text(beginning + ELLIPSIS, style=cell.style)


def exact_time(moment: datetime) -> str:
    """Formats a time with its zone: `2026-01-02T03:04:05Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def relative_time(moment: datetime, now: datetime) -> str:
    """Formats a time relative to now, such as `3 min ago` or `in 2 h`. Times more than a month away
    are shown as a date."""
    span = now - moment
    if abs(span) > timedelta(days=DAYS_RELATIVE_MAX):
        return moment.astimezone(UTC).strftime("%Y-%m-%d")
    seconds = abs(round(span.total_seconds()))
    unit, length = next(((name, size) for name, size in _UNITS if seconds >= size), ("s", 1))
    count = seconds // length
    words = f"{count} {unit}{'s' if unit == 'day' and count > 1 else ''}"
    return f"{words} ago" if span >= timedelta(0) else f"in {words}"


CELL_CHARACTERS_MAX = 120
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")
STYLES = {
    "completed": "green",
    "failed": "red",
    "cancelled": "yellow",
    "leased": "cyan",
    "processing": "cyan",
    "online": "green",
    "offline": "red",
    "draining": "yellow",
    "revoked": "red",
}


def print_json(answer: object, context: CliContext) -> None:
    context.stdout.write(f"{json_text(answer)}\n".encode())
    context.stdout.flush()


def json_text(answer: object) -> str:
    """Returns JSON text. API models are written in the API's format."""
    return json.dumps(answer, indent=2, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else str(value)


def print_rows(
    rows: Iterable[Mapping[str, Any]], columns: Sequence[str], context: CliContext, *, none: str
) -> None:
    """Prints rows as a table. A column is a field's name; `a:b` shows the field b under the heading
    a.

    Times are relative on a terminal, and exact in a pipe."""
    names = [column.partition(":") for column in columns]
    listing = TextTable([heading.replace("_", " ") for heading, _, _ in names])
    now = context.now() if context.out.is_terminal else None
    for row in rows:
        listing.add(*(_styled(value_text(row.get(field or name), now)) for name, _, field in names))
    if listing.rows:
        listing.print_on(context.out)
    else:
        context.say(none)


def print_fields(fields: Mapping[str, Any], context: CliContext) -> None:
    """Prints one field per line. The terminal wraps longer lines, so that they can be copied."""
    shown = {name: value for name, value in fields.items() if value not in (None, [], {}, "")}
    width = max((len(name) for name in shown), default=0) + 2
    for name, value in shown.items():
        text = value_text(value)
        if (moment := _moment(value)) is not None:
            text = f"{text} ({relative_time(moment, context.now())})"
        lines = f"\n{' ' * width}".join(text.splitlines())
        label = Text(name.replace("_", " ").ljust(width), style="dim")
        context.out.print(Text.assemble(label, _styled(lines)), soft_wrap=True)


def table_cell(value: Any, *, longest: int = CELL_CHARACTERS_MAX) -> Text:
    text = value_text(value)
    return _styled(text if len(text) <= longest else f"{text[: longest - 1]}…")


def _styled(text: str) -> Text:
    return Text(printable(text), style=STYLES.get(text, ""))


def value_text(value: Any, now: datetime | None = None) -> str:
    """Formats a value as text. With `now`, times are relative to it, otherwise exact."""
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.1f}"
        case str():
            moment = _moment(value)
            if moment is None:
                return value
            return exact_time(moment) if now is None else relative_time(moment, now)
        case list():
            return ", ".join(value_text(item, now) for item in value) or "–"
        case dict():
            return (
                ", ".join(f"{name}={value_text(item, now)}" for name, item in value.items()) or "–"
            )
        case _:
            return str(value)


def _moment(value: Any) -> datetime | None:
    """Parses a time in the API's format. Returns None for any other value."""
    if not isinstance(value, str) or not _MOMENT.match(value):
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


# Maximum rows per section, so that an inspection fits on a few screens. --all and --json show
# everything.
ROWS_MAX = 40
NAMES_MAX = 6
VALUE_CHARACTERS_MAX = 100
CHOICES_SHOWN_MAX = 3
LIMIT_SHOWN_MAX = 2**31


class InspectionSection:
    """A heading with a table that is limited to a maximum number of rows."""

    def __init__(self, title: str, *columns: str, rows_max: int | None) -> None:
        self._title = title
        self._rows_max = rows_max
        self._left_out = 0
        self._listing = TextTable(columns, indent=2)

    def add(self, *cells: str | Text) -> None:
        if self._rows_max is not None and len(self._listing.rows) >= self._rows_max:
            self._left_out += 1
            return
        self._listing.add(*cells)

    def shown(self, *remarks: str) -> RenderableType:
        more = [f"… and {self._left_out} more (--all shows them)"] if self._left_out else []
        lines = [plain_text(f"  {remark}", "dim") for remark in (*more, *remarks)]
        heading = Text(self._title, style="bold")
        return Group(heading, self._listing, *lines, Text())


def plain_text(text: str, style: str = "") -> Text:
    """Returns text without interpreting brackets as markup."""
    return Text(printable(text), style=style)


def sections(inspection: Inspection, *, everything: bool) -> Iterator[RenderableType]:
    rows_max = None if everything else ROWS_MAX
    yield from _takes(inspection.takes, everything=everything)
    yield from _makes(inspection.makes, rows_max)
    yield from _files(inspection.files, rows_max)
    yield from _packs(inspection, rows_max)
    yield from _parts(inspection, rows_max)
    if inspection.missing is not None:
        yield _missing(inspection.missing, rows_max)


def _takes(takes: Sequence[InspectedInput], *, everything: bool) -> Iterator[RenderableType]:
    chosen = [item for item in takes if everything or _matters(item)] or list(takes)
    if not chosen:
        return
    rows_max = None if everything else ROWS_MAX
    section = InspectionSection(
        "Takes", "set with", "or", "value", "node", "type", rows_max=rows_max
    )
    for item in chosen:
        section.add(
            plain_text(item.address or "–", "cyan"),
            f"--{item.shorthands[0]}" if item.shorthands else "",
            _shorten_inspected(item.value),
            _node_name(item.node, item.exposed_as),
            _type_name(item),
        )
    rest = len(takes) - len(chosen)
    yield section.shown(*([f"and {rest} other values (--all shows them)"] if rest else []))


def _matters(item: InspectedInput) -> bool:
    if item.shorthands or item.exposed_as is not None:
        return True
    return item.role in ("file", "text", "seed", "size", "steps")


def _makes(makes: Sequence[InspectedOutput], rows_max: int | None) -> Iterator[RenderableType]:
    if not makes:
        yield Group(Text("No results: no node saves or shows anything.", style="bold"), Text())
        return
    section = InspectionSection("Makes", "node", "media", "", "kept as", rows_max=rows_max)
    for output in makes:
        saved_as = output.file_name_prefix or "yes" if output.saved else "only shown"
        section.add(output.node.id, output.media, _node_name(output.node), saved_as)
    yield section.shown()


def _files(files: Sequence[NamedFile], rows_max: int | None) -> Iterator[RenderableType]:
    if not files:
        return
    section = InspectionSection("Files", "kind", "", "file", "used by", rows_max=rows_max)
    for file in files:
        section.add(file.kind, _file_state(file), _file_name(file), _listed(file.addresses))
    yield section.shown()
    yield from _downloads(files, rows_max)


def _downloads(files: Sequence[NamedFile], rows_max: int | None) -> Iterator[RenderableType]:
    """Yields the download addresses of models that the server lacks, or of all models if there is
    no server."""
    downloads = [file for file in files if file.url and file.active and not file.present]
    if not downloads:
        return
    section = InspectionSection("Models to download", "file", "from", "into", rows_max=rows_max)
    for file in downloads:
        section.add(file.name, file.url or "", f"models/{file.directory or '?'}")
    yield section.shown()


def _packs(inspection: Inspection, rows_max: int | None) -> Iterator[RenderableType]:
    section = InspectionSection(
        "Required nodes", "pack", "version", "node types", rows_max=rows_max
    )
    counts = {node_type.class_type: node_type.count for node_type in inspection.node_types}
    for pack in _with_unknown_pack(inspection):
        names = sorted(pack.node_types, key=lambda name: -counts.get(name, 0))
        section.add(pack.name, _listed(pack.versions, most=2), _counted(names, counts, rows_max))
    if inspection.node_types:
        yield section.shown()


def _with_unknown_pack(inspection: Inspection) -> Iterator[UsedPack]:
    yield from inspection.packs
    unknown = tuple(
        node_type.class_type for node_type in inspection.node_types if node_type.pack is None
    )
    if unknown:
        yield UsedPack("not named", (), unknown)


def _counted(names: Sequence[str], counts: dict[str, int], rows_max: int | None) -> str:
    shown = [f"{name} ×{counts[name]}" if counts.get(name, 1) > 1 else name for name in names]
    return _listed(shown, most=len(shown) if rows_max is None else 2 * NAMES_MAX)


def _parts(inspection: Inspection, rows_max: int | None) -> Iterator[RenderableType]:
    yield from _groups(inspection, rows_max)
    yield from _subgraphs(inspection, rows_max)
    yield from _chains(inspection, rows_max)
    yield from _switched_off(inspection, rows_max)


def _groups(inspection: Inspection, rows_max: int | None) -> Iterator[RenderableType]:
    section = InspectionSection("Groups", "title", "nodes", "", rows_max=rows_max)
    for group in inspection.groups:
        where = f"in subgraph {group.subgraph}" if group.subgraph else ""
        section.add(group.title, str(group.nodes), where)
    if inspection.groups:
        yield section.shown()


def _subgraphs(inspection: Inspection, rows_max: int | None) -> Iterator[RenderableType]:
    columns = ("name", "instances", "nodes", "takes", "gives")
    section = InspectionSection("Subgraphs", *columns, rows_max=rows_max)
    for subgraph in inspection.subgraphs:
        counts = (str(subgraph.instances), str(subgraph.nodes))
        section.add(subgraph.name, *counts, _listed(subgraph.inputs), _listed(subgraph.outputs))
    if inspection.subgraphs:
        yield section.shown()


def _chains(inspection: Inspection, rows_max: int | None) -> Iterator[RenderableType]:
    section = InspectionSection("Chains", "name", "segments", "", "off already", rows_max=rows_max)
    for chain in inspection.chains:
        titles = f"{chain.segments[0]} to {chain.segments[-1]}" if chain.segments else ""
        section.add(chain.name, str(len(chain.segments)), titles, _listed(chain.off))
    if inspection.chains:
        yield section.shown("comfyfleet convert --segments N keeps the first N")


def _switched_off(inspection: Inspection, rows_max: int | None) -> Iterator[RenderableType]:
    section = InspectionSection("Switched off", "node", "", "", rows_max=rows_max)
    for off in inspection.switched_off:
        section.add(off.node.id, _node_name(off.node), off.how)
    for shell in inspection.dead_shells:
        words = "unused: everything in its subgraph is switched off, so it has no results"
        section.add(shell.id, _node_name(shell), words)
    if inspection.switched_off or inspection.dead_shells:
        yield section.shown()


def _missing(missing: MissingParts, rows_max: int | None) -> RenderableType:
    if not missing:
        return Text("Nothing is missing on the server.", style="green")
    section = InspectionSection("Missing on the server", "what", "where", "", rows_max=rows_max)
    for node_type in missing.node_types:
        pack = f"from {node_type.pack}" if node_type.pack else "its pack isn't named in the file"
        where = _listed([ref.id for ref in node_type.nodes])
        section.add("node type", where, f"{node_type.class_type}, {pack}")
    for value in missing.values:
        closest = f"; closest: {_listed(value.closest)}" if value.closest else ""
        section.add("value", value.address, value.problem + closest)
    for lost in missing.inputs:
        section.add(
            "input", lost.node.id, f"{lost.node.class_type} no longer has the input {lost.input}"
        )
    for file in missing.files:
        section.add("input file", "", f"{file}; upload it before running")
    return section.shown()


def _node_name(node: NodeRef, exposed_as: str | None = None) -> str:
    return exposed_as or " › ".join((*node.path, node.title))


def _type_name(item: InspectedInput) -> str:
    if item.role == "file":
        return "file"
    if item.choices is not None:
        names = [str(choice) for choice in item.choices]
        return f"one of {_listed(names, most=CHOICES_SHOWN_MAX)}" if names else "an empty list"
    return f"{item.type} {_range(item)}".strip()


def _range(item: InspectedInput) -> str:
    """Formats the range of a value. Leaves out extreme limits, such as 2^64 for a seed."""
    least = item.min if item.min is not None and abs(item.min) < LIMIT_SHOWN_MAX else None
    most = item.max if item.max is not None and abs(item.max) < LIMIT_SHOWN_MAX else None
    if least is None:
        return "" if most is None else f"up to {most:g}"
    return f"from {least:g}" if most is None else f"{least:g} – {most:.10g}"


def _shorten_inspected(value: Any) -> str:
    """Formats a value on a single line as JSON, which is also the format for setting it."""
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
