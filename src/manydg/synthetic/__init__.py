"""Synthetic twins of the clinical datasets: raw files in the same formats, drawn from the paper's generative model."""
