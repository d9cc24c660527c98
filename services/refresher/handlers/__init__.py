"""What the refresher does: fold records, publish what changed, describe what it holds."""
