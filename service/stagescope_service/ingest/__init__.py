"""The ingestors: read payloads and dumps on the node where they lie."""
