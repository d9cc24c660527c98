"""Batch jobs: data sets, training, evaluation, the demo. Nothing deployed imports from here (decision 080)."""
