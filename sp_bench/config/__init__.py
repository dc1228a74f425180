"""What a trial is: frozen dataclasses, and how they are read from plain mappings. No torch."""
