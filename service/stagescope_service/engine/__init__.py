"""The coordinator and the ingestors: events in, what happened and what follows out."""
