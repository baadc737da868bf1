"""Where databases and files are."""

from pathlib import Path

from comfyfleet.server.data_folder import DatabaseLocation, locations_from
from comfyfleet.settings import Settings


def test_without_settings_everything_is_in_the_data_folder(tmp_path: Path) -> None:
    places = locations_from(Settings(), tmp_path)
    assert places.central == DatabaseLocation(
        f"sqlite:///{tmp_path}/central.sqlite3", is_embedded=True
    )
    assert places.pools == {"main": DatabaseLocation(f"sqlite:///{tmp_path}/tenants.sqlite3", True)}
    assert places.storage_url == (tmp_path / "files").as_uri()
    names = [file.name for file in places.sqlite_files()]
    assert names == ["central.sqlite3", "tenants.sqlite3"]


def test_what_a_url_names_is_not_ours_to_migrate_or_to_lock(tmp_path: Path) -> None:
    settings = Settings(
        central_database_url="postgresql://db/central",
        tenant_database_urls="a=postgresql://db/a,b=sqlite:////srv/b.sqlite3,c=sqlite:////srv/b.sqlite3",
        storage_url="s3://bucket",
    )
    places = locations_from(settings, tmp_path)
    assert not places.central.is_embedded
    assert not any(place.is_embedded for place in places.pools.values())
    assert places.sqlite_files() == [Path("/srv/b.sqlite3")]
    assert places.storage_url == "s3://bucket"
