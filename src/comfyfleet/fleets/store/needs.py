"""What versions of workflows need of a backend."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select, tuple_

from comfyfleet.db import Tx
from comfyfleet.db.central import workflow_versions

# Node types, models and properties, as they are stored.
Row = tuple[list[str], list[list[str]], list[dict[str, Any]]]


async def of_versions(tx: Tx, keys: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Row]:
    """By workflow and version; an open workflow has none."""
    versions = workflow_versions.c
    query = select(
        versions.workflow_id,
        versions.version,
        versions.node_types,
        versions.models,
        versions.properties,
    ).where(tuple_(versions.workflow_id, versions.version).in_(keys))
    return {(row[0], row[1]): (row[2], row[3], row[4]) for row in await tx.execute(query)}
