"""The command line, `freshet`: what a person types, and the demo that shows the whole system at work."""
