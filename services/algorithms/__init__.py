"""The library: models, retrieval, metrics. Pure: no gRPC, Kafka, Redis, environment or clock."""
