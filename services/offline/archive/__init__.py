"""Past interactions as Parquet files, so that their topic may keep less than all of them (`freshet archive`)."""
