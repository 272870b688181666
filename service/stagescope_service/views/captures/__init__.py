"""Views of captures."""
