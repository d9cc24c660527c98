"""What the generator does with a request."""
