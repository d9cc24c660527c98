"""Retrieval over a mixture of logits: speed beside proof, recall and the roofline."""
