"""Drop an index that no query used and every call paid for."""

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.drop_index("calls_response", table_name="calls")
