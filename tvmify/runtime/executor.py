"""A loaded artifact that is ready to be called, and the packed weights that its calls read."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tvmify.artifact import Artifact
from tvmify.artifact.objects import holds_objects, restore_objects
from tvmify.artifact.structure import structure_of
from tvmify.runtime.graphs import GraphedCall, Graphs, no_capture, obstacle
from tvmify.runtime.native import Call
from tvmify.system import forks
from tvmify.target import Target


class PackedWeights:
    """The packed weights of one module instance, for one set of values.

    Executors for different shapes usually pack a weight in the same way and then share one copy.
    When a weight changes, a new store replaces this one.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._lock = forks.Lock()

    def __len__(self) -> int:
        return len(self._tensors)

    def take(
        self, keys: Sequence[str], pack: Callable[[list[bool]], Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Return the packed weights for these keys, packing only those that are missing.

        Parameters
        ----------
        keys
            ``Artifact.packed``: equal keys mean equal tensors.
        pack
            Takes a flag for each key, and returns the tensors of the flagged keys in order.
        """
        # Packing holds the lock, so that a second executor waits instead of packing again.
        with self._lock:
            wanted = [key not in self._tensors for key in keys]
            if any(wanted):
                missing = itertools.compress(keys, wanted)
                self._tensors.update(zip(missing, pack(wanted), strict=True))
            return [self._tensors[key] for key in keys]


def compiled_module(artifact: Artifact) -> Any:
    """Return a ``torch.classes.tvmify.CompiledModule`` with a copy of an artifact's bytes."""
    # A bytearray, since frombuffer warns about read-only memory.
    library = torch.frombuffer(bytearray(artifact.library), dtype=torch.uint8)
    needed = Target.parse(artifact.target).requirements
    return torch.classes.tvmify.CompiledModule(
        artifact.metadata(), library, needed, list(artifact.complex)
    )


class Executor:
    """Executes one artifact in this process.

    Thread-safe: calls that run while `bind` replaces the weights finish with the old ones.

    Parameters
    ----------
    artifact
        The compiler's output. Its bytes are copied now, and loaded on first use.

    Attributes
    ----------
    artifact : Artifact
        As given.
    refusal : str
        Why it cannot run on this machine; empty if it can.
    compiled : torch.classes.tvmify.CompiledModule
        The native object, which TorchScript can hold too.
    """

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self._call: Call | GraphedCall | None = None
        self._bound: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self._packed: list[torch.Tensor] = []
        self.compiled = compiled_module(artifact)
        self.refusal: str = self.compiled.refusal()

    def share(self) -> Executor:
        """Return an executor without weights that shares the library, for another instance."""
        shared = object.__new__(Executor)
        shared.artifact = self.artifact
        shared._call, shared._bound, shared._packed = None, ([], []), []
        shared.compiled = self.compiled.share()
        shared.refusal = self.refusal
        return shared

    def bind(
        self,
        tensors: Sequence[torch.Tensor],
        store: PackedWeights,
        state: Sequence[torch.Tensor] = (),
    ) -> None:
        """Set the weights for all later calls.

        Parameters
        ----------
        tensors
            The weights that ``artifact.weights`` names, in that order. One that the kernels use
            unpacked shares its memory with the store.
        store
            The module instance's packed weights; only missing ones are packed, and added to it.
        state
            The tensors that ``artifact.state`` names, which calls read and write in place.

        Raises
        ------
        TypeError
            A weight is not a dense tensor on the artifact's device.
        RuntimeError
            A weight does not have the shape or dtype that the artifact was compiled for, or TVM
            cannot load the library.
        """
        if self.artifact.packed:  # otherwise the library has no `pack` function
            detached = [tensor.detach() for tensor in tensors]
            with no_capture(self.artifact):  # both wait for the GPU
                pack = functools.partial(self.compiled.pack, detached)
                self._packed = store.take(self.artifact.packed, pack)
                self.compiled.bind(self._packed)
        # A tensor that is written to may share memory with a weight, or with one that was packed.
        sources = list(tensors) if self.artifact.writes else []
        self._bound = list(state), sources
        if self._call is not None:
            self._bind_call(self._call)

    def _bind_call(self, call: Call | GraphedCall) -> None:
        if isinstance(call, GraphedCall):
            call.keep(self._packed)
        call.bind(*self._bound)

    def call(self, graphs: Graphs | None = None, *, contiguous: bool = False) -> Call | GraphedCall:
        """Return a callable that takes the leaves of the arguments and returns the result.

        As in eager, an argument or buffer that the program returns is the caller's own tensor, and
        views share its memory. All other outputs own their memory, which no later call writes to.

        Parameters
        ----------
        graphs
            The module's CUDA graphs, to capture its calls where the program allows it.
        contiguous
            Leave calls with non-contiguous arguments to eager PyTorch.
        """
        artifact = self.artifact
        rebuild = _rebuild(structure_of(artifact.output_structure))
        call: Call | GraphedCall = Call(
            self.compiled,
            artifact.inputs,
            artifact.outputs,
            rebuild,
            artifact.writes,
            contiguous or artifact.draws_in_order or artifact.needs_contiguous,
            artifact.shapes and artifact.shapes.to_text(),
        )
        if graphs is not None and not contiguous and not obstacle(artifact):
            call = GraphedCall(call, self.compiled, artifact, rebuild, graphs)
        self._bind_call(call)
        self._call = call
        return call


def _rebuild(structure: pytree.TreeSpec) -> Callable[[list[Any]], Any] | None:
    """Return a function that builds the result from its leaves; None if it is a single leaf."""
    if structure.is_leaf():
        return None
    if structure.type in (tuple, list) and all(child.is_leaf() for child in structure.children()):
        return structure.type  # built natively
    if holds_objects(structure):
        return lambda leaves: restore_objects(pytree.tree_unflatten(leaves, structure))
    return lambda leaves: pytree.tree_unflatten(leaves, structure)
