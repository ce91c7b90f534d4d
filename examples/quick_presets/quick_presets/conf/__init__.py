"""YAML presets. Imported at every start, so it stays empty."""
