"""What is there: status of campaigns, one trial, this machine, the methods; and packing of rows."""
