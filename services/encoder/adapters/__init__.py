"""The real things behind the ports: Kafka, Redis, the inference server; and in-memory ones for the tests."""
