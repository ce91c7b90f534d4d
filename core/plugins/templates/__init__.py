"""One small complete plugin per kind, with its tests: what `plugins new` copies. They run as they are, under other names."""
