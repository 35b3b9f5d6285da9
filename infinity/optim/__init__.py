"""torch Optimizers over offloaded parameters."""
