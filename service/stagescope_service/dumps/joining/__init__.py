"""Joins the records of a step to one batch of complete rows."""
