"""Runs the migrations on the connection that `migrate.upgrade` hands over."""

from alembic import context

from stagescope_service.store.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
