"""Generative retrieval: identifiers made of phrases, produced in one parallel pass (PIXAR, Valluri et al. 2024)."""
