"""A user's data in Redis: keys, scripts, the store, sessions, and the leases on partitions."""
