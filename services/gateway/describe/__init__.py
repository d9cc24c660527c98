"""Descriptions for people: the catalogue and a user's stored data. No recommendation passes through here."""
