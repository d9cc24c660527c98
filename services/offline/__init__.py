"""Batch jobs: data sets, training, evaluation, the demo. No deployed process imports from here (decision 080)."""
