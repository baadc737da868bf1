"""Migrated databases, quickly: PostgreSQL copies a template, SQLite a file."""

import shutil
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy.engine import make_url
from tests.dbkit.postgres import create_database

from comfyfleet.db import Database, open_database
from comfyfleet.db.migrating import History, upgrade


@dataclass
class Databases:
    """Makes databases of one kind; with a server on PostgreSQL, without on SQLite."""

    folder: Path
    server_url: str | None = None
    _templates: dict[str, str] = field(default_factory=dict)

    async def url(self, history: History) -> str:
        template = self._templates.get(history) or await self._template(history)
        if self.server_url:
            name = make_url(template).database
            assert name
            return await create_database(self.server_url, template=name)
        copy = self.folder / f"{uuid.uuid4().hex}.sqlite3"
        shutil.copy(template.removeprefix("sqlite:///"), copy)
        return f"sqlite:///{copy}"

    async def open(self, history: History) -> Database:
        return open_database(await self.url(history))

    async def _template(self, history: History) -> str:
        if self.server_url:
            url = await create_database(self.server_url)
        else:
            url = f"sqlite:///{self.folder / f'{history}-template.sqlite3'}"
        database = open_database(url)
        await upgrade(database, history)
        await database.close()
        self._templates[history] = url
        return url
