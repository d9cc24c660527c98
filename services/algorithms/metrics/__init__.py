"""Quality of a ranking as numbers: arrays in, numbers out. No models, no data sets, no files."""
