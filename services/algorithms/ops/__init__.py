"""Numeric operations, one folder each: a public function and its kernels, for CPU or card."""
