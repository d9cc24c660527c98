"""The pure state of a partition of `attributions`."""
