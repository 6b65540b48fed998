"""Keep counts of verdicts and of prompts, and when a run's trainer was last alive."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("runs", sa.Column("heartbeat_at", sa.Float))
    op.add_column("rollouts", sa.Column("continuity", sa.Text))
    op.create_table(
        "verdicts",
        sa.Column("run_id", sa.Text, primary_key=True),
        sa.Column("verdict", sa.Text, primary_key=True),
        sa.Column("calls", sa.Integer, nullable=False),
    )
    op.execute(
        "INSERT INTO verdicts (run_id, verdict, calls) "
        "SELECT run_id, verdict, count(*) FROM (SELECT run_id, CASE WHEN trained_step IS NULL "
        "THEN skip_reason ELSE 'trained' END AS verdict FROM calls) AS judged "
        "WHERE run_id IS NOT NULL AND verdict IS NOT NULL GROUP BY run_id, verdict"
    )
