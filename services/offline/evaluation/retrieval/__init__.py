"""Retrieval over a mixture of logits: speed with proof, recall and the roofline."""
