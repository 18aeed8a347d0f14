"""One attempt to compile: from a request to an outcome, stage by stage.

    request → program in memory
            └ capture → fingerprint → key → load or build → bind → compare → outcome

A stage that cannot continue raises `NotCompiled`. Then the call runs by parts (regions or
submodules), if these can be compiled, and otherwise in eager PyTorch.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from typing import Any

from tvmify.cache import Key
from tvmify.capture import STATIC, Program, Varying, capture, may_ask_for_identity
from tvmify.dispatch import acceptance, keys, on_miss
from tvmify.dispatch.dispatcher_state import DispatcherState
from tvmify.dispatch.generality.sizes import Specialized
from tvmify.dispatch.load_or_build import Wanted, keep, load_again, obtain, reject
from tvmify.dispatch.outcome import Compiled, Eager, Facts, Outcome
from tvmify.dispatch.partition import by_parts
from tvmify.dispatch.programs import Captured, Found, Made, ProgramPlace, Source
from tvmify.dispatch.progress import Stages
from tvmify.dispatch.proof import runs, unusable
from tvmify.dispatch.reasons import without_frames
from tvmify.dispatch.request import Request
from tvmify.errors import (
    CacheMiss,
    CaptureError,
    GradientsNeeded,
    HasEffects,
    NotCompiled,
    TracedElsewhere,
    UnsupportedOperator,
    UnsupportedTarget,
)
from tvmify.runtime import (
    Call,
    Executor,
    GraphedCall,
    PackedWeights,
    check_modes,
    graph_obstacle,
)
from tvmify.signature import Signature
from tvmify.system import forks
from tvmify.system.faults import as_build_error, environment_fault
from tvmify.system.garbage import uncollected
from tvmify.system.signals import check_interrupted
from tvmify.system.stack import refuse_small_stack
from tvmify.torch_compat.saved_tensors import without_saved_tensors_hooks

_LOG = logging.getLogger(__name__)


class Attempt:
    """One attempt to compile a request. The caller holds the lock of the dispatcher.

    Parameters
    ----------
    state
        The state of the dispatcher.
    request
        What to compile.
    stages
        Notified of each stage.
    """

    def __init__(self, state: DispatcherState, request: Request, stages: Stages) -> None:
        self._state = state
        self._subject, self._module = state.subject, state.module
        self._request = request
        self._stages = stages
        # What the stages have found so far; each stage replaces it.
        self._facts = Facts()
        self._differentiable = False

    def outcome(self) -> Outcome:
        """Return the outcome for all calls of this signature."""
        with without_saved_tensors_hooks():
            outcome = self._compiled_or_less()
        how = type(outcome).__name__.lower()
        why = outcome.why if isinstance(outcome, Eager) else ""
        _LOG.debug("%s: %s: %s %s", self._subject.name, outcome.facts.title, how, why)
        return outcome

    def _compiled_or_less(self) -> Outcome:
        try:
            outcome = self._compiled()
        except NotCompiled as reason:
            check_interrupted()
            without_frames(reason)
            if isinstance(reason, UnsupportedOperator) and reason.sets_attributes:
                self._module.current.changes_itself = True
            self._stages.end()  # the stages of regions are counted separately
            if self._request.general is not None:
                return Eager(self._facts, reason)
            call, specs = self._request.call, self._request.specs()
            differentiable = self._differentiable
            outcome = by_parts(self._state, self._facts, reason, call, specs, differentiable)
            if not isinstance(outcome, Eager):
                self._module.current.fails = False
            elif isinstance(reason, CaptureError) and self._module.current.fails is None:
                self._module.current.fails = True
            return outcome
        self._module.current.fails = False
        return outcome

    # ----------------------------------------------------------- … → key → executor → compared

    def _compiled(self) -> Outcome:
        request = self._request
        keys.check_place(request.target, request.signature)
        with as_build_error("compiling it"):
            found = self.obtain(self._module.weights)
        key, executor, artifact = found.key, found.executor, found.executor.artifact
        self._note(shapes=artifact.shapes)
        if artifact.shapes is not None:  # a size that varies may be a constant of this program
            self._note(title=request.title(artifact.shapes))
        self._admit(executor)
        self._stages.begin("bind")
        try:
            bound = self._module.bind(executor)
            run = self._start(executor)
        except (RuntimeError, ValueError, TypeError) as error:
            if fault := environment_fault(error, "binding the weights"):
                raise fault from error
            reject(key, artifact, error, request.options)
            self._state.programs.made.clear()
            if found.source is Source.LOADED:
                return Attempt(self._state, request, self._stages).outcome()
            raise unusable(error) from error
        self._stages.begin("compare")
        eager = self._subject.call(*request.call)
        if request.general is not None:
            written = self._module.tensors(tuple(sorted(artifact.written_state())))
            written += [request.leaves[i] for i in artifact.written_arguments()]
            run = request.general.adapted(run, artifact, request, eager, written)
        compiled = Compiled(
            self._facts, executor, run, bound, request.specs(), self._differentiable
        )
        return self._accepted(compiled, key, eager)

    def obtain(self, store: PackedWeights) -> Found:
        """Return the program for the request, which may be for another machine.

        Parameters
        ----------
        store
            Keeps the weights that are packed for the first run of a new program.

        Raises
        ------
        NotCompiled
            The call cannot be compiled.
        """
        forks.refuse_if_torn()
        request, module, programs = self._request, self._module, self._state.programs
        self._note(title=request.title())
        refuse_small_stack()
        assert module.watched is not None
        self._differentiable = check_modes(module.watched, *request.call)
        if module.current.parts is not None:
            raise module.current.parts.reason  # found for an earlier signature
        if module.changes_itself is not None:
            raise module.changes_itself
        self._await_changes()
        repeated = request.repeated
        if repeated and not may_ask_for_identity(self._subject.captured()):
            repeated = {}
        varying = request.varying
        place = self._place(repeated, request.signature, varying)
        made = programs.made.peek(place)
        if isinstance(made, NotCompiled):
            raise made
        if made is not None:
            self._note(captured=made.captured, key=made.key, source=Source.KEPT)
            return Found(made.key, load_again(made.key, made.artifact), Source.KEPT)
        self._stages.begin("capture")
        try:
            program = self._capture(repeated)
        except CacheMiss:
            raise
        except NotCompiled as reason:
            if isinstance(reason, HasEffects) and reason.may_cease:
                self._postpone(reason)
            if not isinstance(reason, (TracedElsewhere, Specialized)):  # these are temporary
                programs.made.store(place, reason)
            raise
        captured = Captured.of(program)
        self._note(captured=captured)
        found = obtain(self._wanted(program, repeated, store), self._stages)
        self._state.counts.found(found.source)
        self._note(key=found.key, source=found.source)
        if not varying.axes:
            programs.recorded.discard(place)
        programs.made.store(place, Made(found.key, found.executor.artifact, captured))
        return found

    def _postpone(self, reason: HasEffects) -> None:
        """Run the first call in eager, since its side effects may be unique, and try again later.

        Raises
        ------
        CacheMiss
            It is the first call.
        HasEffects
            It is the first call, and must not run in eager.
        """
        state = self._module.current
        if state.had_effects:
            return
        if not self._may_run_in_eager():
            raise reason
        state.had_effects = True
        raise on_miss.postponed(f"{reason.reason}, perhaps only in its first call") from reason

    def _await_changes(self) -> None:
        """Run a call in eager that may change the module once more, since a capture costs more.

        Raises
        ------
        CacheMiss
            The latest calls have changed the module.
        """
        if on_miss.is_building_now() or not self._may_run_in_eager():
            return
        if self._module.may_go_on_changing():
            self._module.current.changes_itself = True
            raise on_miss.postponed("not captured yet: the latest calls have changed the module")

    def _may_run_in_eager(self) -> bool:
        options, is_general = self._request.options, self._request.general is not None
        return not (options.strict or options.on_miss == "error" or is_general)

    def _place(
        self, repeated: Mapping[int, int], signature: Signature, varying: Varying
    ) -> ProgramPlace:
        number, request = self._module.current.number, self._request
        modes = request.modes, request.gradients
        return number, signature, *modes, str(repeated), str(request.target), varying

    def _capture(self, repeated: Mapping[int, int]) -> Program:
        args, kwargs, varying = self._request.args, self._request.kwargs, self._request.varying
        options, state = self._request.options, self._module.current
        recorded, owner = self._state.programs.recorded, self._subject.captured()
        place = self._place(repeated, self._request.signature, varying.recorded())
        program = state.scripted
        if program is None or not program.accepts(args, kwargs):
            program = recorded.peek(place)
        if program is not None and program.accepts(args, kwargs):
            return program.of(owner)
        try:
            with on_miss.capturing(options), uncollected():
                program = capture(owner, args, kwargs, varying)
        except NotCompiled as reason:
            self._module.admit_reads(reason.read)
            raise
        self._module.admit_reads(program.read)
        self._module.hold_constants(program)
        if program.serves_every_signature:
            state.scripted = program.of(None)
        elif varying.axes and not program.is_general:
            # It serves the sizes of this call only. The next request is for such a program.
            place = self._place(repeated, Signature.of(args, kwargs), STATIC)
            recorded.store(place, program.of(None))
            raise Specialized
        elif on_miss.in_background(options) or program.is_general:
            recorded.store(place, program.of(None))
        return program

    def _wanted(
        self, program: Program, repeated: Mapping[int, int], store: PackedWeights
    ) -> Wanted:
        request, module = self._request, self._module
        weights = dict(zip(program.weights, module.tensors(program.weights), strict=True))
        target = keys.target_of_call(request.signature, weights, request.target)
        written = {id(tensor) for tensor in module.written()}
        volatile = {name for name, weight in weights.items() if id(weight) in written}
        fingerprint = program.fingerprint
        if repeated and program.asks_for_identity:
            fingerprint += f"\narguments that are one tensor: {repeated}"
        eager = self._subject.call(*request.call)
        prove = functools.partial(runs, module, store, request, eager)
        return Wanted(request, program, fingerprint, target, weights, volatile, prove)

    def _admit(self, executor: Executor) -> None:
        """Check that a program may run here, and register what it writes to.

        Raises
        ------
        UnsupportedTarget
            It is for another machine.
        GradientsNeeded
            It writes to tensors, and autograd would not notice.
        """
        if executor.refusal:
            raise UnsupportedTarget(
                f"code for this target cannot run here: {executor.refusal}",
                "Omit target=, or save() the module for a machine of that kind.",
            )
        if executor.artifact.writes:
            writes = executor.artifact.written_names()
            self._note(writes=writes)
            if self._differentiable:
                raise GradientsNeeded(
                    f"forward writes to {writes}, and weights require gradients",
                    "Call under torch.no_grad() or torch.inference_mode().",
                )
        if self._module.admit_writes(executor.artifact):
            # their programs may have packed weights that now change
            self._state.memory.clear()
            self._state.programs.made.clear()

    def _start(self, executor: Executor) -> Call | GraphedCall:
        """Return what runs calls of the program: as CUDA graphs, if the option is set."""
        graphs = self._state.graphs if self._request.options.cuda_graph else None
        if graphs is not None and (obstacle := graph_obstacle(executor.artifact)):
            self._note(no_graph=obstacle)
        return executor.call(graphs, contiguous=self.asks_for_layout)

    @property
    def asks_for_layout(self) -> bool:
        """Whether what was captured reads strides."""
        captured = self._facts.captured
        return captured is not None and captured.asks_for_layout

    def _accepted(self, compiled: Compiled, key: Key, eager: Any) -> Compiled | Eager:
        leaves, options = self._request.leaves, self._request.options
        is_tuned = options.tune is not None
        acceptance.check_results(compiled, leaves, eager, is_tuned=is_tuned)
        acceptance.check_random(compiled, leaves, eager)
        outcome: Compiled | Eager = compiled
        if options.compares():
            artifact = compiled.executor.artifact
            known = dict(artifact.verdicts)
            outcome = acceptance.faster(compiled, leaves, eager)
            self._facts = outcome.facts
            if artifact.verdicts != known:
                self._stages.begin("store")
                keep(key, artifact, options)
        if isinstance(outcome, Eager):
            return outcome
        has_constants = self._module.has_constants
        return acceptance.with_followed(outcome, leaves, eager, has_constants=has_constants)

    def _note(self, **facts: Any) -> None:
        self._facts = dataclasses.replace(self._facts, **facts)
