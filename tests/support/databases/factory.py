"""Migrated databases, quickly: on PostgreSQL those of earlier tests are emptied, on SQLite a file
is copied."""

import shutil
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
from sqlalchemy.engine import make_url
from tests.support.databases.postgres import create_database

from comfyfleet.server.db import Database, open_database
from comfyfleet.server.db.schema import History, upgrade_schema

# A database with a changed schema can't be used by another test.
_SCHEMA = """SELECT (SELECT count(*) FROM pg_class), (SELECT count(*) FROM pg_constraint),
    (SELECT count(*) FROM pg_trigger), (SELECT count(*) FROM pg_attribute)"""
_OTHERS_GO = """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()"""
_TABLES = """SELECT quote_ident(tablename) FROM pg_tables
    WHERE schemaname = 'public' AND tablename NOT LIKE 'comfyfleet%version'"""
_SEQUENCES = """SELECT quote_literal(quote_ident(sequencename)) FROM pg_sequences
    WHERE schemaname = 'public'"""


@dataclass
class _Template:
    url: str
    schema: tuple[Any, ...] = ()
    emptying: str = ""


@dataclass
class Databases:
    """Creates databases of one kind: PostgreSQL if there is a server, otherwise SQLite."""

    folder: Path
    server_url: str | None = None
    _templates: dict[str, _Template] = field(default_factory=dict)
    _free: dict[str, list[str]] = field(default_factory=dict)
    _lent: dict[str, str] = field(default_factory=dict)

    async def url(self, history: History, *, is_new: bool = False) -> str:
        """`is_new`: never used before. An emptied one has larger indexes, and other query plans."""
        template = self._templates.get(history) or await self._template(history)
        if not self.server_url:
            copy = self.folder / f"{uuid.uuid4().hex}.sqlite3"
            shutil.copy(template.url.removeprefix("sqlite:///"), copy)
            return f"sqlite:///{copy}"
        free = self._free.setdefault(history, [])
        name = make_url(template.url).database
        assert name
        url = (
            free.pop()
            if free and not is_new
            else await create_database(self.server_url, template=name)
        )
        self._lent[url] = history
        return url

    async def open(self, history: History, *, is_new: bool = False) -> Database:
        return open_database(await self.url(history, is_new=is_new))

    async def give_back(self, *urls: str) -> None:
        """Returns databases that are no longer needed: they are emptied for the next test."""
        for url in urls:
            history = self._lent.pop(url, None)
            if history and await _emptied(url, self._templates[history]):
                self._free[history].append(url)

    async def _template(self, history: History) -> _Template:
        if self.server_url:
            url = await create_database(self.server_url)
        else:
            url = f"sqlite:///{self.folder / f'{history}-template.sqlite3'}"
        database = open_database(url)
        await upgrade_schema(database, history)
        await database.close()
        self._templates[history] = await _described(url) if self.server_url else _Template(url)
        return self._templates[history]


async def _described(url: str) -> _Template:
    """Returns the template with its schema and the statements that empty a copy of it.

    The lists of tables and sequences take longer to read than the tables take to be emptied.
    """
    connection = await asyncpg.connect(url)
    try:
        schema = tuple(await connection.fetchrow(_SCHEMA))
        tables = [row[0] for row in await connection.fetch(_TABLES)]
        sequences = [row[0] for row in await connection.fetch(_SEQUENCES)]
    finally:
        await connection.close()
    statements = [
        "SET session_replication_role = replica",  # the ledger's triggers refuse changes
        *(f"DELETE FROM {table}" for table in tables),  # noqa: S608  (names of our own)
        *(f"SELECT setval({sequence}, 1, false)" for sequence in sequences),
    ]
    return _Template(url, schema, ";".join(statements))


async def _emptied(url: str, template: _Template) -> bool:
    """Empties the database; returns whether it is as good as new. Migrations leave no rows."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(_OTHERS_GO)
        if tuple(await connection.fetchrow(_SCHEMA)) != template.schema:
            return False
        await connection.execute(template.emptying)
        return True
    finally:
        await connection.close()
