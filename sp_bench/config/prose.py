"""Marks text that only people read.

Annotate with it a function that returns a reason, a field or parameter that names something in a message, or a variable
that is part of an error. Identities ignore such text (planning/source_hash.py), so no measurement may depend on it.
"""

Prose = str
