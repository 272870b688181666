"""One reader a format: files in, records out."""
