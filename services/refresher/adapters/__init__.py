"""Adapters of the ports: Kafka, Redis, files."""
