"""A catalogue in shards against one process that holds all of it: contents, bounds, recall, cost, outages."""
