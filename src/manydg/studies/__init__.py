"""Experiments: each a list of runs and a way to fold their records into a table or a figure."""

from __future__ import annotations
