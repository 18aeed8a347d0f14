"""Programs captured by TorchScript, whole or in regions."""
