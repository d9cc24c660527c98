"""Anisotropic (score-aware) quantization: codebooks that keep the high scores, handed to FAISS for the scan.

arXiv:1908.10396, corrected where docs/decisions/007-anisotropic-quantization.md says.
"""

from services.algorithms.quantization.inverted_file import InvertedFileQuantizer, train_inverted_file
from services.algorithms.quantization.product_quantizer import ProductQuantizer, train_product_quantizer
from services.algorithms.quantization.vector_quantizer import VectorQuantizer, train_vector_quantizer

__all__ = [
    "InvertedFileQuantizer",
    "ProductQuantizer",
    "VectorQuantizer",
    "train_inverted_file",
    "train_product_quantizer",
    "train_vector_quantizer",
]
