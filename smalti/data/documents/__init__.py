"""Raw documents: finds files, reads their formats, and writes the Parquet files of documents."""
