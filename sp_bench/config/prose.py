"""A mark for text that only people read.

It is an annotation: of a function that says why something cannot be, of a field or parameter that names something in
a message, of a text that an error ends with. Identities leave such text out (driver/source_hash.py), so nothing that is
measured may depend on what it says.
"""

Prose = str
