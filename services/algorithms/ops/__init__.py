"""Numeric operations, one folder each: a public function and what it runs on, compiled for the CPU or for a card."""
