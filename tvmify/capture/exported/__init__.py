"""Programs captured by ``torch.export``, where scripting fails."""
