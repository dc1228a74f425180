"""Shows what is there: campaigns, one trial, this machine, the methods. Also packs the rows of a campaign."""
