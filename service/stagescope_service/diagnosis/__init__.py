"""Diagnosis: a rulebook held against the history of a run; `rules/` holds one file a symptom."""
