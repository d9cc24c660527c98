"""The real things behind the ports: Kafka, Redis, files; and in-memory ones for the tests."""
