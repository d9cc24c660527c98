"""The quality of recommendations: the models' baselines, and the rules of the comparison."""
