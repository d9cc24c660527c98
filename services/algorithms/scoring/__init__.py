"""States, and the parts of their scores: model, votes, impressions."""
