"""What processes exchange: values, and their Protobuf messages."""
