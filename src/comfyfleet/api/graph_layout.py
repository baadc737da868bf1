"""Places boxes in layers from left to right, and leads the lines between them around the others. Pure.

Each box is one layer behind the last one that leads to it. Boxes of a layer are sorted by where their neighbours are,
so that few lines cross; then each moves towards its neighbours. A line over several layers has a place in each."""

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

LAYER_GAP, BOX_GAP = 56.0, 22.0
LABEL_ROOM = 36.0  # beside the text of a line
PASS_HEIGHT = 8.0  # of the place that a line has in a layer
PASSES_MAX = 5_000  # places of lines; lines beyond that go straight
SWEEPS = 6


class Size(NamedTuple):
    width: float
    height: float


class Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float


class Edge(NamedTuple):
    points: tuple[tuple[float, float], ...]
    label: tuple[float, float]  # where its text stands


class Layout(NamedTuple):
    size: Size
    boxes: Mapping[str, Box]
    edges: tuple[Edge, ...]  # in the order in which they were given


Place: TypeAlias = Hashable  # a node's name, or (edge, layer) where a line passes


def lay_out(
    sizes: Mapping[str, Size], edges: Sequence[tuple[str, str]], labels: Sequence[float] = ()
) -> Layout:
    """Edges name boxes of `sizes`; `labels` are the widths of their texts. An edge that leads back, as
    in a graph with a cycle, is drawn, and not counted.
    """
    layer_of = layers(sizes, edges)
    routes = _routes(layer_of, edges)
    columns: list[list[Place]] = [[] for _ in range(max(layer_of.values(), default=-1) + 1)]
    for node in sizes:
        columns[layer_of[node]].append(node)
    for route in routes:
        for number, place in enumerate(route[1:-1], start=1):
            columns[layer_of[str(route[0])] + number].append(place)
    before, after = _neighbours(routes)
    _sort(columns, before, after)
    heights: dict[Place, float] = {name: size.height for name, size in sizes.items()}
    tops = _tops(columns, before, after, heights)
    gaps = [LAYER_GAP] * len(columns)
    for (source, _), label in zip(edges, labels, strict=False):
        gaps[layer_of[source]] = max(gaps[layer_of[source]], label + LABEL_ROOM)
    lefts, width = _lefts(columns, sizes, gaps)
    top = min(tops.values(), default=0.0)
    boxes = {
        name: Box(lefts[layer_of[name]], tops[name] - top, *size) for name, size in sizes.items()
    }
    height = max((each.y + each.height for each in boxes.values()), default=0.0)
    passes = {place: at - top + PASS_HEIGHT / 2 for place, at in tops.items() if place not in sizes}
    height = max([height, *(at + PASS_HEIGHT for at in passes.values())])
    drawn = _drawn(routes, boxes, passes, lefts, layer_of, sizes)
    return Layout(Size(width, height), boxes, drawn)


def layers(nodes: Iterable[str], edges: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Returns the layer of each node: one more than the highest of those that lead to it."""
    waiting = dict.fromkeys(nodes, 0)
    targets: dict[str, list[str]] = {node: [] for node in waiting}
    for source, target in edges:
        targets[source].append(target)
        waiting[target] += 1
    found = dict.fromkeys(waiting, 0)
    ready = [node for node, count in waiting.items() if not count]
    left = dict.fromkeys(waiting)
    while left:
        # Of a cycle, the first node is taken as if nothing led to it.
        node = ready.pop() if ready else next(iter(left))
        if node not in left:
            continue
        del left[node]
        for target in targets[node]:
            waiting[target] -= 1
            if target in left:
                found[target] = max(found[target], found[node] + 1)
                if not waiting[target]:
                    ready.append(target)
    return found


def _routes(
    layer_of: Mapping[str, int], edges: Sequence[tuple[str, str]]
) -> list[tuple[Place, ...]]:
    """Returns each line as the places that it passes, with its ends."""
    routes: list[tuple[Place, ...]] = []
    passes = 0
    for number, (source, target) in enumerate(edges):
        between = range(layer_of[source] + 1, layer_of[target])
        if passes + len(between) > PASSES_MAX:
            between = range(0)
        passes += len(between)
        routes.append((source, *((number, layer) for layer in between), target))
    return routes


Neighbours: TypeAlias = dict[Place, list[Place]]


def _neighbours(routes: Iterable[tuple[Place, ...]]) -> tuple[Neighbours, Neighbours]:
    before: Neighbours = {}
    after: Neighbours = {}
    for route in routes:
        for one, two in itertools.pairwise(route):
            after.setdefault(one, []).append(two)
            before.setdefault(two, []).append(one)
    return before, after


def _sort(columns: list[list[Place]], before: Neighbours, after: Neighbours) -> None:
    """Sorts each layer by the mean place of its neighbours, there and back a few times."""
    for sweep in range(SWEEPS):
        is_forth = sweep % 2 == 0
        order = range(1, len(columns)) if is_forth else range(len(columns) - 2, -1, -1)
        for number in order:
            beside = columns[number - 1 if is_forth else number + 1]
            at = {place: index for index, place in enumerate(beside)}
            near = before if is_forth else after
            now = {place: index for index, place in enumerate(columns[number])}
            columns[number].sort(key=lambda place: _mean(place, near, at, now[place]))


def _mean(place: Place, near: Neighbours, at: Mapping[Place, float], else_at: float) -> float:
    found = [at[each] for each in near.get(place, ()) if each in at]
    return sum(found) / len(found) if found else else_at


def _tops(
    columns: list[list[Place]],
    before: Neighbours,
    after: Neighbours,
    heights: Mapping[Place, float],
) -> dict[Place, float]:
    tops: dict[Place, float] = {}
    for column in columns:
        total = sum(heights.get(each, PASS_HEIGHT) + BOX_GAP for each in column) - BOX_GAP
        y = -total / 2
        for place in column:
            tops[place] = y
            y += heights.get(place, PASS_HEIGHT) + BOX_GAP
    for sweep in range(SWEEPS):
        is_forth = sweep % 2 == 0
        for column in columns if is_forth else columns[::-1]:
            _move(column, before if is_forth else after, heights, tops)
    return tops


def _move(
    column: list[Place],
    near: Neighbours,
    heights: Mapping[Place, float],
    tops: dict[Place, float],
) -> None:
    """Moves the boxes of a layer towards their neighbours, without changing their order."""
    middles = {
        each: tops[each] + heights.get(each, PASS_HEIGHT) / 2
        for place in column
        for each in (place, *near.get(place, ()))
    }
    wanted = [
        _mean(place, near, middles, middles[place]) - heights.get(place, PASS_HEIGHT) / 2
        for place in column
    ]
    placed: list[float] = []
    for place, want in zip(column, wanted, strict=True):
        lowest = placed[-1] if placed else want
        placed.append(max(want, lowest))
        tops[place] = placed[-1]
        placed[-1] += heights.get(place, PASS_HEIGHT) + BOX_GAP
    # Who came first pushed the others down: all go up by the mean of that.
    if column:
        pushed = sum(tops[place] - want for place, want in zip(column, wanted, strict=True))
        for place in column:
            tops[place] -= pushed / len(column)


def _lefts(
    columns: list[list[Place]], sizes: Mapping[str, Size], gaps: Sequence[float]
) -> tuple[list[float], float]:
    lefts: list[float] = []
    x = end = 0.0
    for column, gap in zip(columns, gaps, strict=True):
        lefts.append(x)
        widths = (sizes[each].width for each in column if isinstance(each, str))
        end = x + max(widths, default=0.0)
        x = end + gap
    return lefts, end


def _drawn(
    routes: Sequence[tuple[Place, ...]],
    boxes: Mapping[str, Box],
    passes: Mapping[Place, float],
    lefts: Sequence[float],
    layer_of: Mapping[str, int],
    sizes: Mapping[str, Size],
) -> tuple[Edge, ...]:
    """Returns the points of each line. Lines of one box begin and end apart from each other."""
    widths = [0.0] * len(lefts)
    for name, layer in layer_of.items():
        widths[layer] = max(widths[layer], sizes[name].width)
    starts = _spread(routes, boxes, passes, end=0)
    ends = _spread(routes, boxes, passes, end=-1)
    edges: list[Edge] = []
    for number, route in enumerate(routes):
        source, target = boxes[str(route[0])], boxes[str(route[-1])]
        points = [(source.x + source.width, starts[number])]
        for step, place in enumerate(route[1:-1], start=1):
            layer = layer_of[str(route[0])] + step
            points += [
                (lefts[layer], passes[place]),
                (lefts[layer] + widths[layer], passes[place]),
            ]
        points.append((target.x, ends[number]))
        (x, y), (to_x, to_y) = points[0], points[1]
        edges.append(Edge(tuple(points), ((x + to_x) / 2, (y + to_y) / 2 - 4)))
    return tuple(edges)


def _spread(
    routes: Sequence[tuple[Place, ...]],
    boxes: Mapping[str, Box],
    passes: Mapping[Place, float],
    *,
    end: int,
) -> dict[int, float]:
    """Returns the heights at which lines leave a box (`end` 0) or come in (-1), sorted by where they lead."""
    by_box: dict[str, list[int]] = {}
    for number, route in enumerate(routes):
        by_box.setdefault(str(route[end]), []).append(number)
    found: dict[int, float] = {}
    for name, numbers in by_box.items():
        box = boxes[name]
        numbers.sort(
            key=lambda number: _height(routes[number][1 if end == 0 else -2], boxes, passes)
        )
        for at, number in enumerate(numbers, start=1):
            found[number] = box.y + box.height * at / (len(numbers) + 1)
    return found


def _height(place: Place, boxes: Mapping[str, Box], passes: Mapping[Place, float]) -> float:
    if isinstance(place, str):
        return boxes[place].y + boxes[place].height / 2
    return passes[place]
