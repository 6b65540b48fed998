"""Keep the agent (role) that a reward counts for."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("rewards", sa.Column("agent", sa.Text))
