"""What it changes what people did: a dislike, a like, an impression, and states led away from what was turned down."""
