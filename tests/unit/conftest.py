"""Puts this folder on the import path, so that the areas below share the scenes that lie beside this file."""
