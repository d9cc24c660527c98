"""Anisotropic (score-aware) quantization: codebooks that keep the high scores, handed to FAISS for the scan.

arXiv:1908.10396, corrected where docs/decisions/007-anisotropic-quantization.md says.
"""
