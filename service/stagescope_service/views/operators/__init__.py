"""Views of operators."""
