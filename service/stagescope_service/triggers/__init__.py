"""Triggers: rules on published metrics, held against the steps of a run; pure, but for reading."""
