"""The op table: the spellings of every op."""
