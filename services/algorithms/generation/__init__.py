"""Generative retrieval: identifiers of phrases, in one parallel pass (PIXAR, Valluri et al. 2024)."""
