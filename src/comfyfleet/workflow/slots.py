"""Part of pass 4: which link ends at which input of a node.

The saved list of links says a slot by number, the saved inputs say it by name; names win, for slots
move when a class changes. For most nodes that is all. Nodes whose inputs depend on a choice, or grow
as they are linked, are built up by the editor step by step, and a link that sits on the wrong slot
at the wrong moment is lost there. So the same steps are taken here.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from comfyfleet.workflow.model import Link, Slot
from comfyfleet.workflow.widgettypes import Growth, Widget


class Input(NamedTuple):
    """An input slot of a node, with the link that ends there."""

    name: str
    type: str
    widget: str | None = None
    link: Link | None = None


def link_inputs(
    inputs: Sequence[Input], saved: Sequence[Slot], links: Sequence[Link]
) -> list[Input]:
    """For a node whose inputs are fixed."""
    if not links:
        return list(inputs)
    by_name = {slot.name: index for index, slot in enumerate(inputs)}
    by_id = {link.id: link for link in links}
    result = list(inputs)
    placed = 0
    for slot in saved:
        link = by_id.get(slot.link) if slot.link is not None else None
        index = by_name.get(slot.name)
        if link is not None and index is not None and result[index].link is None:
            result[index] = result[index]._replace(link=link)
            placed += 1
    if placed == len(links) and len(by_name) == len(inputs):
        return result
    bench = Workbench(inputs, links)
    bench.realign(saved)
    return bench.result()


def link_dynamic_inputs(
    bench: "Workbench", widgets: Sequence[Widget], final: Sequence[Input], saved: Sequence[Slot]
) -> list[Input]:
    """For a node with choices that bring inputs, or groups that grow.

    On the bench are its inputs as first laid out, with every choice at its default; `final` are
    those that its choices bring.
    """
    choices = {widget.name for widget in widgets if widget.children is not None}
    if bench.has_branch_of(choices):
        bench.realign([slot for slot in saved if not bench.is_growing(slot.name)])
    bench.learn(widgets)
    for widget in widgets:
        if widget.children is not None:
            branch = [slot for slot in final if slot.name.startswith(f"{widget.name}.")]
            bench.switch_branch(f"{widget.name}.", branch)
    bench.realign(saved)
    return bench.result()


class _Place:
    """One input slot on the bench."""

    __slots__ = ("link", "slot")

    def __init__(self, slot: Input) -> None:
        self.slot = slot
        self.link: Link | None = None


class Workbench:
    """The inputs of one node while links are put to them."""

    def __init__(self, inputs: Iterable[Input], links: Sequence[Link]) -> None:
        self._places = [_Place(slot) for slot in inputs]
        self._loose: dict[int, Link] = {}  # at a slot number that no input has
        self._growth: dict[str, Growth] = {}
        for link in links:
            if 0 <= link.target_slot < len(self._places):
                self._places[link.target_slot].link = link
            else:
                self._loose[link.id] = link

    def result(self) -> list[Input]:
        return [place.slot._replace(link=place.link) for place in self._places]

    def learn(self, widgets: Iterable[Widget]) -> None:
        """Which groups of sockets grow, and how."""
        for widget in widgets:
            if widget.growth is not None:
                self._growth[widget.growth.group] = widget.growth

    def is_growing(self, name: str) -> bool:
        return name.rpartition(".")[0] in self._growth

    def has_branch_of(self, choices: set[str]) -> bool:
        return any(place.slot.name.rpartition(".")[0] in choices for place in self._places)

    def switch_branch(self, prefix: str, branch: Sequence[Input]) -> None:
        """The inputs of a branch are made anew; only links on an input of the same name survive."""
        kept = {place.slot.name: place.link for place in self._places if place.link is not None}
        rest = [place for place in self._places if not place.slot.name.startswith(prefix)]
        fresh = [_Place(slot) for slot in branch]
        self._places = [*rest, *fresh]
        for place in fresh:
            place.link = kept.get(place.slot.name)
        for place in fresh:
            if place.link is not None:
                self._grow(place.slot.name)

    def realign(self, saved: Sequence[Slot]) -> None:
        """Moves each link to the input that is saved with it, as often as that makes inputs grow."""
        named = self._named_links(saved)
        skipped: set[int] = set()
        passes = 0
        while passes < len(named):
            moves = self._moves(named, skipped)
            if not moves:
                return
            removals = self._displaced(named, moves)
            stuck = self._stuck(moves, removals)
            if stuck:
                skipped.update(stuck)
                continue
            passes += 1
            self._apply(moves, removals)

    def _named_links(self, saved: Sequence[Slot]) -> dict[int, tuple[Link, list[str]]]:
        here = {place.link.id: place.link for place in self._places if place.link is not None}
        here.update(self._loose)
        named: dict[int, tuple[Link, list[str]]] = {}
        for slot in saved:
            if slot.link is not None and slot.link in here:
                named.setdefault(slot.link, (here[slot.link], []))[1].append(slot.name)
        return named

    def _moves(
        self, named: dict[int, tuple[Link, list[str]]], skipped: set[int]
    ) -> list[tuple[Link, _Place]]:
        moves = []
        for link, names in named.values():
            if link.id in skipped:
                continue
            fitting = [place for place in self._places if place.slot.name in names]
            sits_right = any(place.link is link for place in fitting)
            if fitting and not sits_right and self._is_present(link):
                moves.append((link, fitting[0]))
        return moves

    def _is_present(self, link: Link) -> bool:
        return link.id in self._loose or any(place.link is link for place in self._places)

    def _displaced(
        self, named: dict[int, tuple[Link, list[str]]], moves: list[tuple[Link, _Place]]
    ) -> list[Link]:
        """Links whose own input is gone give way to those that are moved to where they sit."""
        names_here = {place.slot.name for place in self._places}
        homeless = {link.id for link, names in named.values() if not names_here.intersection(names)}
        return [
            place.link for _, place in moves if place.link is not None and place.link.id in homeless
        ]

    def _stuck(self, moves: list[tuple[Link, _Place]], removals: list[Link]) -> set[int]:
        """Moves onto an input that is held by a link which stays. All of one pass go together."""
        free = {link.id for link, _ in moves} | {link.id for link in removals}
        blocked = {
            link.id for link, place in moves if place.link is not None and place.link.id not in free
        }
        if blocked:
            return blocked
        destinations = {id(place) for _, place in moves}
        return set() if len(destinations) == len(moves) else {link.id for link, _ in moves}

    def _apply(self, moves: list[tuple[Link, _Place]], removals: list[Link]) -> None:
        leaving = {link.id for link, _ in moves} | {link.id for link in removals}
        for place in self._places:
            if place.link is not None and place.link.id in leaving:
                place.link = None
        for link, place in moves:
            self._loose.pop(link.id, None)
            place.link = link
        for _, place in moves:
            self._grow(place.slot.name)

    def _grow(self, name: str) -> None:
        """A linked socket of a growing group makes the next one appear."""
        growth = self._growth.get(name.rpartition(".")[0])
        following = growth.following(name) if growth else None
        if growth is None or following is None:
            return
        if all(place.slot.name != following for place in self._places):
            self._places.append(_Place(Input(following, growth.type)))
