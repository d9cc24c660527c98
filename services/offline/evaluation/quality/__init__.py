"""The quality of recommendations: what the models are compared with, and by which rules."""
