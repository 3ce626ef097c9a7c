"""The passes on the fx graph, one per file, and what they share."""
