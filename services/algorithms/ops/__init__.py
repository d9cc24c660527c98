"""Numeric operations, one folder each: a public function and its kernels, compiled for the CPU or for a card."""
