"""A decoder, its loss and its optimizer step, sharded over ranks."""
