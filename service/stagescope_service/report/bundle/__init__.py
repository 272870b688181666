"""A step of a run as one archive without secrets, and such an archive opened again."""
