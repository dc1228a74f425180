"""From valid trials to rows: campaigns, attempts, and the processes of each. No torch."""
