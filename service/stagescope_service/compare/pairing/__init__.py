"""Which rows and pieces of two dumps belong together, and their numbers, shard by shard."""
