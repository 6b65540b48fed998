"""Find a run's first queued rollout by one entry of an index."""

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.drop_index("rollouts_queue", "rollouts")
    op.create_index("rollouts_queue", "rollouts", ["run_id", "state", "ordinal"])
