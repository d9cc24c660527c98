"""Codes and quantized search next to other libraries."""
