"""What is trained, and on what: a decoder, its loss, real text, and what the engines' training steps share."""
