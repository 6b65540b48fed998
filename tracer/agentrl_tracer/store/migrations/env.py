"""Run migrations for alembic, on the connection that ``database`` passes."""

from alembic import context

from agentrl_tracer.store.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, transactional_ddl=False)
context.run_migrations()
