"""Anisotropic (score-aware) quantization: codebooks that preserve high scores, passed to FAISS for the scan.

arXiv:1908.10396, corrected as docs/decisions/007-anisotropic-quantization.md says.
"""
