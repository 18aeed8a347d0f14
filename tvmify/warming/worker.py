"""A process of `tvmify.warming`: creates the object, and builds programs on request.

Run as ``python -m tvmify.warming.worker``. It reads JSON lines, and answers each with a JSON line.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from typing import Any, TextIO

import torch
from torch import nn

from tvmify.decorate.decorated import dispatcher_of, dispatchers_of, is_decorated
from tvmify.decorate.decorator import tvmify
from tvmify.dispatch import on_miss, recording
from tvmify.dispatch.dispatcher import Dispatcher
from tvmify.dispatch.generality.declared import Declared, in_order
from tvmify.dispatch.outcome import Choice, Compiled, Eager
from tvmify.dispatch.progress import Stages
from tvmify.dispatch.recording import Recorded
from tvmify.dispatch.recording.modes import entered
from tvmify.errors import NotCompiled, TvmifyError, WarmUpError
from tvmify.torch_compat.parts import trains
from tvmify.warming import BUILT, EAGER, LOADED


class Subjects:
    """The decorated objects that a name refers to.

    Parameters
    ----------
    name
        ``package.module:attribute``: a module, a decorated function, or a function without
        arguments that returns one.

    Attributes
    ----------
    notes
        Remarks about them.

    Raises
    ------
    WarmUpError
        The name refers to nothing of this kind.
    """

    def __init__(self, name: str) -> None:
        self.notes: list[str] = []
        self._all = self._decorated(_made(_named(name), name), name)
        kept = [s for s in self._all if dispatchers_of(s)[0].subject.options.cache_directory()]
        if not kept:
            raise WarmUpError(f"{name} stores no programs on disk: it has the option cache=False")

    @property
    def names(self) -> list[str]:
        """The names under which their calls are recorded."""
        return sorted(set(map(_name_of, self._all)))

    @property
    def threads_count(self) -> bool:
        """Whether the programs depend on the number of threads."""
        return any(dispatchers_of(s)[0].subject.options.tune for s in self._all)

    def dispatchers(self, recorded: Recorded) -> list[Dispatcher]:
        """Return what runs a call, for each object of the name; without one, the first object."""
        subjects = [s for s in self._all if recorded.module in ("", _name_of(s))]
        subjects = subjects if recorded.module else subjects[:1]
        method, with_cache = recorded.method or None, recorded.with_cache
        return [dispatcher_of(subject, method, with_cache=with_cache) for subject in subjects]

    def _decorated(self, made: Any, name: str) -> list[Any]:
        if isinstance(made, nn.Module):
            if any(map(trains, made.modules())):
                made.eval()
                self.notes.append(f"{name} was in training mode: switched to evaluation mode")
            parts = [part for part in made.modules() if is_decorated(part)]
            if parts:
                return parts
            self.notes.append(f"{name} is not decorated, so the default options were used")
            return [tvmify(made)]
        if is_decorated(made):
            return [made]
        raise WarmUpError(
            f"{name} is a {type(made).__qualname__}: expected a torch.nn.Module, a function that "
            "tvmify decorated, or a function without arguments that returns one of these"
        )


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise WarmUpError(f"{name!r} does not exist: expected package.module:attribute")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise WarmUpError(f"{name!r} cannot be imported: {error}") from error
    except Exception as error:  # of any kind: user code
        raised = f"{type(error).__name__}: {error}"
        raise WarmUpError(f"{name!r} cannot be imported: {raised}") from error
    return found


def _made(found: Any, name: str) -> Any:
    if isinstance(found, nn.Module) or is_decorated(found) or not callable(found):
        return found
    try:
        return found()
    except Exception as error:  # of any kind: user code
        raise WarmUpError(f"{name}() raised {type(error).__name__}: {error}") from error


def _name_of(subject: Any) -> str:
    return dispatchers_of(subject)[0].subject.named.owner


# ----------------------------------------------------------------------------------------- build


def warm(subjects: Subjects, recorded: Recorded, target: Any, threads: int) -> dict[str, Any]:
    """Build or load the program of a signature; return the fields of `tvmify.warming.Outcome`."""
    begun = time.perf_counter()
    parts: list[dict[str, Any]] = []
    try:
        if recorded.modes.get("training"):
            raise WarmUpError("the module was in training mode, which runs in eager PyTorch")
        for dispatcher in subjects.dispatchers(recorded):
            options = dispatcher.subject.options
            wanted = recorded.modes if options.tune else recorded.modes | {"threads": 1}
            Stages.threads = threads
            with entered(wanted), on_miss.building_now():
                names_target = (target or options.target) is not None
                args, kwargs = recorded.call(names_target and not torch.cuda.is_available())
                ordered = in_order(dispatcher.subject, args, kwargs, recorded.declared())
                parts.append(_warm(dispatcher, args, *ordered, target))
    except TvmifyError as error:
        reason = error.reason if isinstance(error, NotCompiled) else str(error)
        parts.append({"source": EAGER, "reason": reason})
    except Exception as error:  # of any kind: user code
        parts.append({"source": EAGER, "reason": f"{type(error).__name__}: {error}"})
    sources = [part["source"] for part in parts]
    return {
        "signature": str(recorded),
        "source": next(s for s in (EAGER, BUILT, LOADED) if s in sources),
        "reason": next((part["reason"] for part in parts if part.get("reason")), ""),
        "seconds": round(time.perf_counter() - begun, 3),
        "bytes": sum(part.get("bytes", 0) for part in parts),
    }


def _warm(
    dispatcher: Dispatcher, args: Any, kwargs: Any, declared: Declared, target: Any
) -> dict[str, Any]:
    before, reason, size = dispatcher.cache_info(), "", 0
    if target is not None:
        artifact, *_ = dispatcher.compiled_for_file(args, kwargs, target, declared)
        size = len(artifact.library)
    else:
        outcome = dispatcher.warm_up(args, kwargs, declared)
        if isinstance(outcome, Eager):
            why = outcome.why
            reason = why.value if isinstance(why, Choice) else why.reason
            return {"source": EAGER, "reason": reason}
        if isinstance(outcome, Compiled):
            size = len(outcome.executor.artifact.library)
            if declared and outcome.facts.shapes is None:
                why = outcome.facts.one_shape or "its sizes are static"
                reason = f"for this shape alone: {why}"
        else:
            dispatcher(args, kwargs)  # its regions are compiled by calls
            reason = outcome.parts.how
    is_built = dispatcher.cache_info().builds > before.builds
    return {"source": BUILT if is_built else LOADED, "reason": reason, "bytes": size}


# ------------------------------------------------------------------------------------- the lines


def main() -> None:
    """Answer until the input ends."""
    # What user code prints goes to standard error.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        with contextlib.suppress(KeyboardInterrupt):
            _answer(sys.stdin, answers)


def _answer(requests: TextIO, answers: TextIO) -> None:
    def send(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    recording.is_on = False
    torch.set_num_threads(1)
    try:
        subjects = Subjects(json.loads(requests.readline())["subject"])
    except (WarmUpError, ValueError) as error:
        send({"error": str(error)})
        return
    answer = {"names": subjects.names, "notes": subjects.notes}
    send(answer | {"threads_count": subjects.threads_count})
    for line in requests:
        request = json.loads(line)
        recorded = Recorded.from_json(request["signature"])
        send(warm(subjects, recorded, request["target"], request["threads"]))


if __name__ == "__main__":
    main()
