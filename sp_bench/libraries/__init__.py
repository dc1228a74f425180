"""What the adapters of one library share: how it is imported here, and what of it is put back afterwards."""
