"""Read msprobe's files as operator tables in Parquet."""
