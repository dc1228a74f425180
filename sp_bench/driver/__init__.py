"""From a command line to rows: plan, campaign, attempts, and the processes of each. No torch."""
