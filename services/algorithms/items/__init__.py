"""A catalogue as it was trained and as it changes, and what is popular in it."""
