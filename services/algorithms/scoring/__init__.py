"""States and what their scores are made of: model, votes, impressions."""
