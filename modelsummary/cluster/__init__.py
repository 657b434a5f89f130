"""Plans for training on a cluster."""
