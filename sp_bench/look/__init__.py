"""Shows the state of campaigns, one trial, this machine and the methods. Also packs the rows of a campaign."""
