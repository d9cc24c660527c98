"""Sequence encoders and similarity heads in PyTorch: shapes in, states out. Nothing here trains, exports or serves."""
