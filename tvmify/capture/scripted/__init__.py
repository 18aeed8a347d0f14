"""Programs captured by TorchScript."""
