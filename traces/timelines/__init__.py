"""Memory over time as files: CSV, npz, Parquet, and Perfetto's JSON."""
