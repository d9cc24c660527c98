"""Catalogues of millions: algorithms in the library and in the service."""
