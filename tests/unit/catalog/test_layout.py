"""How a prompt, which says nothing of places, is drawn."""

from collections.abc import Iterator

from comfyfleet.server.catalog.layout import _columns

Feed = tuple[int, str, int]


class ReadFeeds(list[Feed]):
    """Links into one node, which count how often they are gone through."""

    reads = 0

    def __iter__(self) -> Iterator[Feed]:
        ReadFeeds.reads += 1
        return super().__iter__()


def test_a_node_is_drawn_behind_all_that_feed_it_and_each_link_is_followed_once() -> None:
    """The last node comes first, and a file that somebody was sent may have thousands."""
    count = 150
    feeds = {str(at): ReadFeeds([(0, str(at + 1), 0)]) for at in range(count)}
    feeds[str(count)] = ReadFeeds()
    ReadFeeds.reads = 0
    found = _columns(feeds)
    assert [found[str(at)] for at in range(count + 1)] == list(range(count, -1, -1))
    assert ReadFeeds.reads <= 2 * len(feeds)


def test_a_circle_is_drawn_too() -> None:
    found = _columns({"a": [(0, "b", 0)], "b": [(0, "a", 0)], "c": []})
    assert set(found) == {"a", "b", "c"}
