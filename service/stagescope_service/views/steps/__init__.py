"""Views of steps."""
