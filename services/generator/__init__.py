"""The generator process: finds items by words."""
