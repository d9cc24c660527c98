"""The candidates process: first-stage and full top-K."""
