"""Full garbage collections: of little whenever it is time, of much only once an hour."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from comfyfleet import garbage


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)


def test_what_exists_at_the_start_is_not_looked_at_again() -> None:
    garbage.limit_collections()
    assert len(gc.get_objects()) < 1_000
    assert gc.get_freeze_count() > 10_000


def test_a_small_heap_is_collected_as_a_whole() -> None:
    garbage.limit_collections()
    cycle: list[object] = []
    cycle.append(cycle)
    gc.collect(1)  # now it is old
    del cycle
    full = gc.get_stats()[2]["collections"]
    assert garbage.collect(is_large_allowed=False)
    assert gc.get_stats()[2]["collections"] == full + 1


def test_a_large_heap_is_collected_as_a_whole_only_if_that_is_allowed() -> None:
    garbage.limit_collections()
    large = [[number] for number in range(garbage.SMALL_OBJECTS + 1)]
    gc.collect(1)
    full = gc.get_stats()[2]["collections"]
    assert not garbage.collect(is_large_allowed=False)
    assert gc.get_stats()[2]["collections"] == full
    assert garbage.collect(is_large_allowed=True)
    assert gc.get_stats()[2]["collections"] == full + 1
    assert large


def test_creating_much_starts_no_full_collection() -> None:
    garbage.limit_collections()
    full = gc.get_stats()[2]["collections"]
    large = [[number] for number in range(1_000_000)]
    assert gc.get_stats()[2]["collections"] == full
    assert large


class Node:
    """An object that can refer to itself."""

    other: "Node"


def test_cycles_are_collected_next_to_many_objects_that_stay() -> None:
    garbage.limit_collections()
    large = [[number] for number in range(garbage.SMALL_OBJECTS + 1)]
    gc.collect(1)
    garbage.collect(is_large_allowed=False)
    node = Node()
    node.other = node
    cycle = weakref.ref(node)
    gc.collect(1)  # now it is old
    del node
    garbage.collect(is_large_allowed=False)
    assert cycle() is None
    assert large


def test_exempted_cycles_are_collected_with_the_large_heap() -> None:
    garbage.limit_collections()
    node = Node()
    node.other = node
    cycle = weakref.ref(node)
    large = [[number] for number in range(garbage.SMALL_OBJECTS + 1)]
    gc.collect(1)
    garbage.collect(is_large_allowed=False)
    del node
    garbage.collect(is_large_allowed=False)
    assert cycle() is not None
    garbage.collect(is_large_allowed=True)
    assert cycle() is None
    assert large
