"""The real adapters of the ports: Redis, Kafka, and the other processes over gRPC."""
