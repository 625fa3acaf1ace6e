"""Raw clinical files to dataset folders, one module per format, and synthetic twins of each."""
