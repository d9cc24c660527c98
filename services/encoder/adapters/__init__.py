"""Adapters of the ports: Kafka, Redis, the inference server."""
