"""One loaded artifact, ready to be called, and the packed weights that its calls read."""

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
    """The weights of one module instance at one moment, as its executors lay them out.

    Executors for different shapes mostly pack a weight alike; then they share one copy. When a
    weight changes, a new store takes the place of this one.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._lock = forks.Lock()

    def __len__(self) -> int:
        return len(self._tensors)

    def take(
        self, keys: Sequence[str], pack: Callable[[list[bool]], Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Return the packed weights of these keys, packing only what is missing.

        Parameters
        ----------
        keys
            ``Artifact.packed``: equal keys mean equal tensors.
        pack
            Returns the tensors of the keys that are wanted, in order; there is a flag for each key.
        """
        # The lock is held while packing: a second executor had better wait for the result.
        with self._lock:
            wanted = [key not in self._tensors for key in keys]
            if any(wanted):
                missing = itertools.compress(keys, wanted)
                self._tensors.update(zip(missing, pack(wanted), strict=True))
            return [self._tensors[key] for key in keys]


def compiled_module(artifact: Artifact) -> Any:
    """Return a ``torch.classes.tvmify.CompiledModule`` of an artifact, with a copy of its bytes."""
    # frombuffer wants memory that may be written to
    library = torch.frombuffer(bytearray(artifact.library), dtype=torch.uint8)
    needed = Target.parse(artifact.target).requirements
    return torch.classes.tvmify.CompiledModule(artifact.metadata(), library, needed)


class Executor:
    """Executes one artifact in this process.

    Safe to use from several threads at once: calls that run while `bind` replaces the weights
    finish with those that they began with.

    Parameters
    ----------
    artifact
        What the compiler made. Its bytes are copied now, and loaded when they are first used.

    Attributes
    ----------
    artifact : Artifact
        As given.
    refusal : str
        Why it cannot run on this machine; empty if it can.
    compiled : torch.classes.tvmify.CompiledModule
        The native object, which TorchScript can hold, too.
    """

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self._call: Call | GraphedCall | None = None
        self._bound: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self._packed: list[torch.Tensor] = []
        self.compiled = compiled_module(artifact)
        self.refusal: str = self.compiled.refusal()

    def share(self) -> Executor:
        """Return an executor of the same loaded library without weights, for another instance."""
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
        """Let all calls from now on read these weights.

        Parameters
        ----------
        tensors
            The weights that ``artifact.weights`` names, in that order. One that the kernels use
            as it is shares its memory with the store.
        store
            Of the module instance; what it has is not packed again, what it lacks is added.
        state
            The tensors that ``artifact.state`` names: calls read and write these themselves.

        Raises
        ------
        TypeError
            A weight is not a dense tensor of the device that the artifact is for.
        RuntimeError
            A weight has not the shape or dtype that the artifact was compiled for, or the bytes are
            not a library that TVM can load.
        """
        if self.artifact.packed:  # else the library has no function to pack weights
            detached = [tensor.detach() for tensor in tensors]
            with no_capture(self.artifact):  # since both wait for the GPU
                pack = functools.partial(self.compiled.pack, detached)
                self._packed = store.take(self.artifact.packed, pack)
                self.compiled.bind(self._packed)
        # What is written to may share memory with a weight, as the source of a packed one, too.
        sources = list(tensors) if self.artifact.writes else []
        self._bound = list(state), sources
        if self._call is not None:
            self._bind_call(self._call)

    def _bind_call(self, call: Call | GraphedCall) -> None:
        if isinstance(call, GraphedCall):
            call.keep(self._packed)
        call.bind(*self._bound)

    def call(self, graphs: Graphs | None = None, *, contiguous: bool = False) -> Call | GraphedCall:
        """Return the callable that takes the leaves of the arguments and returns the result.

        An argument or a buffer that the program returns comes back as the caller's own tensor, and
        views share its memory, as in eager. All other outputs own their memory: no later call
        writes to it.

        Parameters
        ----------
        graphs
            Of the module, if its calls are to be CUDA graphs; a program that cannot be one is not.
        contiguous
            Leave calls with arguments that are not contiguous to eager PyTorch.
        """
        artifact = self.artifact
        rebuild = _rebuild(structure_of(artifact.output_structure))
        call: Call | GraphedCall = Call(
            self.compiled,
            artifact.inputs,
            artifact.outputs,
            rebuild,
            artifact.writes,
            artifact.needs_contiguous or contiguous,
        )
        if graphs is not None and not contiguous and not obstacle(artifact):
            call = GraphedCall(call, self.compiled, artifact, rebuild, graphs)
        self._bind_call(call)
        self._call = call
        return call


def _rebuild(structure: pytree.TreeSpec) -> Callable[[list[Any]], Any] | None:
    """Return what turns the leaves of a result into the result; None where it is its only leaf."""
    if structure.is_leaf():
        return None
    if structure.type in (tuple, list) and all(child.is_leaf() for child in structure.children()):
        return structure.type  # built natively
    if holds_objects(structure):
        return lambda leaves: restore_objects(pytree.tree_unflatten(leaves, structure))
    return lambda leaves: pytree.tree_unflatten(leaves, structure)
