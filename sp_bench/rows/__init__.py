"""The row of an attempt: its schema, how it is written and read. No torch."""
