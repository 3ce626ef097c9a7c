"""The op table: which spelling is which operation."""
