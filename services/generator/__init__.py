"""The generator process: items found by words."""
