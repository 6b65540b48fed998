"""Keep feedback of people, and list calls without a run by time."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "feedback",
        sa.Column("run_id", sa.Text),
        sa.Column("rollout_id", sa.Text),
        sa.Column("call_id", sa.Text),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("author", sa.Text, nullable=False),
        sa.Column("thumb", sa.Integer),
        sa.Column("score", sa.Float),
        sa.Column("label", sa.Text),
        sa.Column("comment", sa.Text),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("id", sa.Text, primary_key=True),
    )
    for name in ("run", "rollout", "call"):
        op.create_index(f"feedback_{name}", "feedback", [f"{name}_id"])
    served = sa.text("run_id IS NULL")
    op.create_index(
        "calls_served",
        "calls",
        ["run_id", "started_at", "id"],
        sqlite_where=served,
        postgresql_where=served,
    )
