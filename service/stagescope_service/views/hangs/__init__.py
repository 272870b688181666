"""Views of hangs."""
