"""What the gateway does: `recommend` answers readers, `record` serves writers. Dataclasses in and out."""
