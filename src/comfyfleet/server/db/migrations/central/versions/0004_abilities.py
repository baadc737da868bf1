"""What decides who can run a job: a hash of each backend's offer, and what it refused."""

import hashlib
import json
from typing import Any

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Json

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("comfyui_workers", sa.Column("facts_hash", sa.String(length=64), nullable=True))
    op.add_column("comfyui_workers", sa.Column("refusals", Json, nullable=True))
    _hash_what_was_told()


def _hash_what_was_told() -> None:
    """Workers tell their facts only when they change."""
    workers = sa.table(
        "comfyui_workers",
        sa.column("id", sa.BigInteger),
        sa.column("facts", Json),
        sa.column("facts_hash", sa.String),
    )
    connection = op.get_bind()
    rows = connection.execute(sa.select(workers.c.id, workers.c.facts)).all()
    for row_id, facts in rows:
        if facts:
            changed = sa.update(workers).where(workers.c.id == row_id)
            connection.execute(changed.values(facts_hash=_hashed(facts)))


def _hashed(facts: dict[str, Any]) -> str:
    files = {name: sorted(offered) for name, offered in facts.get("model_files", {}).items()}
    told = json.dumps([sorted(facts.get("node_types", ())), files], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()
