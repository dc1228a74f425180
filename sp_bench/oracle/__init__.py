"""What proves a method or a training step right before, and beside, its timing."""
