"""A user's data in Redis: keys, scripts, store, sessions, and leases on partitions."""
