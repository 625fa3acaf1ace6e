"""Training: the loop, its configuration, checkpoints and the record a run leaves."""
