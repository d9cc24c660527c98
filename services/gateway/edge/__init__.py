"""Who may call what, what they did, and texts that only this gateway can have made."""
