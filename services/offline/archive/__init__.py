"""`freshet archive`: copy past interactions to Parquet files, so that their topic can have a shorter retention."""
