"""Alembic's entry point: always run by ``engine.upgrade`` with a connection of its own."""

from alembic import context

from agentrl_tracer.store.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, transactional_ddl=False)
context.run_migrations()
