"""Where trials run. Each launcher takes what is left of a campaign and commits one row a trial."""
