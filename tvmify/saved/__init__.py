"""Compiled modules as files: TorchScript archives and ``torch.export`` programs."""
