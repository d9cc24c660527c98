"""The algorithms over item states on a torch device: certified kernels on a CUDA card, the plain passes elsewhere."""
