"""Views of comparisons."""
