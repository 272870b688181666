"""Pair the rows and shards of two dumps, and compare them shard by shard."""
