"""Training: optimizers, schedule and EMA, the loop."""
