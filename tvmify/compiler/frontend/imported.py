"""A program in Relax, and how it is called."""

from __future__ import annotations

from dataclasses import dataclass

import tvm

from tvmify.artifact.results import Result
from tvmify.artifact.writes import Writable, Write


@dataclass(frozen=True)
class Imported:
    """A Relax module with one function, ``main(*inputs, *state, *weights)``, and how it is called.

    Attributes
    ----------
    ir_mod
        ``main`` returns a tuple of the tensors that the program computes.
    inputs
        Index, among the flattened arguments of the call, of each tensor that ``main`` takes.
    weights
        Dotted name of each parameter or buffer that ``main`` takes last.
    state, writes, outputs, complex, needs_contiguous
        See `tvmify.artifact.artifact.Artifact`.
    output_structure
        The pytree of the result as text.
    operators
        How often each ATen operator occurs.
    bridged
        How often each operator occurs that PyTorch computes, inside the program.
    draws
        Which of these draw random numbers.
    """

    ir_mod: tvm.IRModule
    inputs: tuple[int, ...]
    state: tuple[str, ...]
    weights: tuple[str, ...]
    writes: tuple[Write, ...]
    outputs: tuple[Result, ...]
    complex: tuple[int, ...]
    needs_contiguous: tuple[Writable, ...]
    output_structure: str
    operators: dict[str, int]
    bridged: dict[str, int]
    draws: tuple[str, ...]
