"""The backends: one table each."""
