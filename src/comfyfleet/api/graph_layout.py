"""Arranges boxes in layers from left to right, and routes the lines between them around other
boxes. Pure.

Each box is in the layer after the last box that leads to it. The boxes of a layer are sorted by the
positions of their neighbors to reduce crossings, and are then moved towards their neighbors. A line
that crosses several layers has a position in each of them.
"""

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

LAYER_GAP, BOX_GAP = 56.0, 22.0
LABEL_ROOM = 36.0  # space around the label of a line
PASS_HEIGHT = 8.0  # height that a line occupies in a layer
PASSES_MAX = 5_000  # positions of lines in layers; lines beyond this limit are straight
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
    label: tuple[float, float]  # position of its label


class Layout(NamedTuple):
    size: Size
    boxes: Mapping[str, Box]
    edges: tuple[Edge, ...]  # in the order of the given edges


Place: TypeAlias = Hashable  # a node's name, or (edge, layer) where a line passes


def lay_out(
    sizes: Mapping[str, Size], edges: Sequence[tuple[str, str]], labels: Sequence[float] = ()
) -> Layout:
    """Computes a layout. Edges refer to boxes in `sizes`, and `labels` are the widths of their
    labels. Edges that lead back, which occur in graphs with cycles, are routed but don't affect the
    layers."""
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
    height = max((box.y + box.height for box in boxes.values()), default=0.0)
    passes = {place: at - top + PASS_HEIGHT / 2 for place, at in tops.items() if place not in sizes}
    height = max([height, *(at + PASS_HEIGHT for at in passes.values())])
    drawn = _drawn(routes, boxes, passes, lefts, layer_of, sizes)
    return Layout(Size(width, height), boxes, drawn)


def layers(nodes: Iterable[str], edges: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Returns the layer of each node: one more than the highest layer of the nodes that lead to
    it."""
    waiting = dict.fromkeys(nodes, 0)
    targets: dict[str, list[str]] = {node: [] for node in waiting}
    for source, target in edges:
        targets[source].append(target)
        waiting[target] += 1
    levels = dict.fromkeys(waiting, 0)
    ready = [node for node, count in waiting.items() if not count]
    remaining = dict.fromkeys(waiting)
    while remaining:
        # In a cycle, the first node is treated as if no node led to it.
        node = ready.pop() if ready else next(iter(remaining))
        if node not in remaining:
            continue
        del remaining[node]
        for target in targets[node]:
            waiting[target] -= 1
            if target in remaining:
                levels[target] = max(levels[target], levels[node] + 1)
                if not waiting[target]:
                    ready.append(target)
    return levels


def _routes(
    layer_of: Mapping[str, int], edges: Sequence[tuple[str, str]]
) -> list[tuple[Place, ...]]:
    """Returns the positions that each line passes, including its ends."""
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
    """Sorts each layer by the mean position of its neighbors, in several sweeps back and forth."""
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
    positions = [at[neighbor] for neighbor in near.get(place, ()) if neighbor in at]
    return sum(positions) / len(positions) if positions else else_at


def _tops(
    columns: list[list[Place]],
    before: Neighbours,
    after: Neighbours,
    heights: Mapping[Place, float],
) -> dict[Place, float]:
    tops: dict[Place, float] = {}
    for column in columns:
        total = sum(heights.get(place, PASS_HEIGHT) + BOX_GAP for place in column) - BOX_GAP
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
    """Moves the boxes of a layer towards their neighbors, without changing their order."""
    middles = {
        item: tops[item] + heights.get(item, PASS_HEIGHT) / 2
        for place in column
        for item in (place, *near.get(place, ()))
    }
    targets = [
        _mean(place, near, middles, middles[place]) - heights.get(place, PASS_HEIGHT) / 2
        for place in column
    ]
    placed: list[float] = []
    for place, want in zip(column, targets, strict=True):
        lowest = placed[-1] if placed else want
        placed.append(max(want, lowest))
        tops[place] = placed[-1]
        placed[-1] += heights.get(place, PASS_HEIGHT) + BOX_GAP
    # Each box pushed the following ones down, so all of them move up by the mean displacement.
    if column:
        pushed = sum(tops[place] - want for place, want in zip(column, targets, strict=True))
        for place in column:
            tops[place] -= pushed / len(column)


def _lefts(
    columns: list[list[Place]], sizes: Mapping[str, Size], gaps: Sequence[float]
) -> tuple[list[float], float]:
    lefts: list[float] = []
    x = end = 0.0
    for column, gap in zip(columns, gaps, strict=True):
        lefts.append(x)
        widths = (sizes[place].width for place in column if isinstance(place, str))
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
    """Returns the points of each line. Lines that share a box begin and end at different points."""
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
    """Returns the y positions where lines leave a box (`end` 0) or enter it (-1), sorted by the
    positions of their other ends.
    """
    by_box: dict[str, list[int]] = {}
    for number, route in enumerate(routes):
        by_box.setdefault(str(route[end]), []).append(number)
    positions: dict[int, float] = {}
    for name, numbers in by_box.items():
        box = boxes[name]
        numbers.sort(
            key=lambda number: _height(routes[number][1 if end == 0 else -2], boxes, passes)
        )
        for at, number in enumerate(numbers, start=1):
            positions[number] = box.y + box.height * at / (len(numbers) + 1)
    return positions


def _height(place: Place, boxes: Mapping[str, Box], passes: Mapping[Place, float]) -> float:
    if isinstance(place, str):
        return boxes[place].y + boxes[place].height / 2
    return passes[place]
