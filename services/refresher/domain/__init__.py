"""The state of a partition of `attributions`: pure, without Kafka, Redis, files or Protobuf."""
