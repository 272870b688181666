"""Triggers at work: closed steps compared with the rules, and what a firing does."""
