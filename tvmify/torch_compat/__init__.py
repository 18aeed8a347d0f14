"""Everything that works around PyTorch: its tracing state, its warnings, its pytrees."""
