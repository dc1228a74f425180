"""What nobody measured: step times and memory predicted from rows, and advice."""
