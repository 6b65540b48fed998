"""Nothing looks calls up by their response, and every call paid for that index."""

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.drop_index("calls_response", table_name="calls")
