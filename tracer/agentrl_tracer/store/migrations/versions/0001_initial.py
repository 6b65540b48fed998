"""Name the first schema. A new store is made from the tables, so no code creates it."""

revision = "0001"
down_revision = None


def upgrade() -> None: ...
