"""Text retrieval: who answers real questions best."""
