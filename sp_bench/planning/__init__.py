"""From a command line to an ordered list of valid trials: nothing runs here. No torch."""
