"""Numeric operations, one folder each: a public function, its plain PyTorch reference, and faster backends."""
