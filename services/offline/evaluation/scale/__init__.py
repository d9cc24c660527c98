"""What an item, a user and a record cost in bytes and processor time, and how well it predicts other sizes."""
