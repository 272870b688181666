"""What msprobe wrote, read as operator tables in Parquet."""
