"""Studies: experiments plan runs, do those that are missing, and aggregate their records into tables and figures."""

from __future__ import annotations
