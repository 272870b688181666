"""Triggers: rules on published metrics, evaluated on the steps of a run; no side effects."""
