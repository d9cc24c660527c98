"""What a partition of `attributions` makes of its records: pure, no Kafka, no Redis, no files, no Protobuf."""
