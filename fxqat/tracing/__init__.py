"""The user's model becomes a graph."""
