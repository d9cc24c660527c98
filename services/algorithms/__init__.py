"""The library: models, indexes, feedback and rules. It uses no gRPC, Kafka or Redis."""
