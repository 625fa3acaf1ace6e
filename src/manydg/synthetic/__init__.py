"""Synthetic twins of the clinical datasets: raw files in the same formats, drawn from the paper's generative model.

Each module holds one :class:`manydg.sources.Twin` and has the name of its source.
"""
