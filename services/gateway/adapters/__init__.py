"""The real things behind the ports: Redis, Kafka, and the other processes over gRPC."""
