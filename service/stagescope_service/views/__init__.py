"""Views: what the service answers, by noun, read from the store; no HTTP."""
