"""Train the phrase model: its losses, its examples, the shortlist, and the `phrases/` part of a text bundle."""
