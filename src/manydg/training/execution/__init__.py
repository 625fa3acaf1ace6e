"""How steps are executed: batches, CUDA graphs, compilation, precision, several processes: speed, never results."""
