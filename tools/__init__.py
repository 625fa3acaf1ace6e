"""Developers' scripts: measures and checks of the package's own source."""
