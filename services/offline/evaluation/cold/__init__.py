"""People of whom little is known: what popularity is worth for them, and until when."""
