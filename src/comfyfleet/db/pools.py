"""The tenant databases, by name."""

from collections.abc import Iterator, Mapping

from comfyfleet.db.engine import Database
from comfyfleet.kernel.errors import NotFound


class Pools:
    def __init__(self, databases: Mapping[str, Database]) -> None:
        self._databases = dict(databases)

    def __getitem__(self, name: str) -> Database:
        try:
            return self._databases[name]
        except KeyError:
            raise NotFound(
                f"there is no pool {name!r}; COMFYFLEET_TENANT_DATABASE_URLS names them"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._databases)

    def items(self) -> Iterator[tuple[str, Database]]:
        return iter(self._databases.items())

    async def close(self) -> None:
        for database in self._databases.values():
            await database.close()
