"""A new model goes live, and back, under load: who noticed."""
