"""A mapping that is never changed: a change makes a new one, and costs little even among thousands.

The entries lie in a fixed number of small dicts. A new mapping shares all of them with the old one
but those that a change touches, so that a run of ten thousand jobs is not copied for each of them.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

BUCKETS = 256
K = TypeVar("K")
V = TypeVar("V")


class Buckets(Mapping[K, V]):
    __slots__ = ("_buckets", "_count")

    def __init__(self, entries: Mapping[K, V] | None = None) -> None:
        self._buckets: tuple[dict[K, V], ...] = ({},) * BUCKETS
        self._count = 0
        if entries:
            filled = self.changed(entries)
            self._buckets, self._count = filled._buckets, filled._count

    def changed(self, entries: Mapping[K, V], gone: Iterable[K] = ()) -> "Buckets[K, V]":
        """With these entries put in or in place of older ones, and without those that are gone."""
        fresh: dict[int, dict[K, V]] = {}
        for key, value in entries.items():
            self._fresh(fresh, key)[key] = value
        for key in gone:
            self._fresh(fresh, key).pop(key, None)
        buckets = list(self._buckets)
        count = self._count
        for number, bucket in fresh.items():
            count += len(bucket) - len(buckets[number])
            buckets[number] = bucket
        made: Buckets[K, V] = Buckets()
        made._buckets, made._count = tuple(buckets), count
        return made

    def _fresh(self, fresh: dict[int, dict[K, V]], key: K) -> dict[K, V]:
        number = hash(key) % BUCKETS
        if number not in fresh:
            fresh[number] = dict(self._buckets[number])
        return fresh[number]

    def __getitem__(self, key: K) -> V:
        return self._buckets[hash(key) % BUCKETS][key]

    def get(self, key: K, default: Any = None) -> Any:
        return self._buckets[hash(key) % BUCKETS].get(key, default)

    def __iter__(self) -> Iterator[K]:
        """In no particular order: whoever needs one must sort."""
        for bucket in self._buckets:
            yield from bucket

    def __len__(self) -> int:
        return self._count

    def __hash__(self) -> int:
        raise TypeError("a mapping of values that may be lists has no hash")

    def __repr__(self) -> str:
        return f"Buckets({dict(self)!r})"
