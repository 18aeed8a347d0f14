"""Random weights that keep the activations of a deep network in range."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

Network = TypeVar("Network", bound=nn.Module)


def with_random_weights(network: Network) -> Network:
    """Fill convolutions to keep the variance, and batch norms so that none is an identity.

    PyTorch's own initialization shrinks activations by a third in each layer: after fifty layers,
    only the biases of the batch norms are left, and errors are not those of a trained network.
    """
    for module in network.modules():
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.0)
            nn.init.normal_(module.bias, std=0.1)
            nn.init.normal_(module.running_mean, std=0.1)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    return network
