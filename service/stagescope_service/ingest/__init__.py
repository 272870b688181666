"""TODO: what ingest holds."""
