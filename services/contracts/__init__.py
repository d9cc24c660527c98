"""What processes say to each other: values, and the Protobuf messages that carry them."""
