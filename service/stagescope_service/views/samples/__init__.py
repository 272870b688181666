"""Views of samples."""
