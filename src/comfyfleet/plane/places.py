"""Where the databases and the files are: as the settings say, else in the data folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from comfyfleet.kernel.settings import Settings, parse_pools

CENTRAL_FILE, TENANTS_FILE, FILES_FOLDER = "central.sqlite3", "tenants.sqlite3", "files"
POOL = "main"


@dataclass(frozen=True, slots=True)
class Place:
    """A database's URL. Those in the data folder are ours alone, so we migrate them ourselves."""

    url: str
    is_embedded: bool = False

    @property
    def file(self) -> Path | None:
        """None unless it is SQLite."""
        kind, separator, path = self.url.partition(":///")
        return Path(path) if separator and kind.startswith("sqlite") else None


@dataclass(frozen=True, slots=True)
class Places:
    central: Place
    pools: Mapping[str, Place]
    storage_url: str

    def sqlite_files(self) -> list[Path]:
        """Each once: several pools may name one file."""
        places = (self.central, *self.pools.values())
        return sorted({place.file.resolve() for place in places if place.file is not None})


def places_of(settings: Settings, data: Path) -> Places:
    root = data.resolve()
    pools = {name: Place(url) for name, url in parse_pools(settings.tenant_database_urls).items()}
    return Places(
        central=_given(settings.central_database_url) or _embedded(root / CENTRAL_FILE),
        pools=pools or {POOL: _embedded(root / TENANTS_FILE)},
        storage_url=settings.storage_url or (root / FILES_FOLDER).as_uri(),
    )


def _given(url: str) -> Place | None:
    return Place(url) if url else None


def _embedded(file: Path) -> Place:
    return Place(f"sqlite:///{file}", is_embedded=True)
