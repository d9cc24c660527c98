"""Codes and quantized search beside other libraries."""
