"""Signals during a compilation: only errors of their handlers reach the caller."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tvmify import tvmify as decorate
from tvmify.compiler import pipeline
from tvmify.compiler.codegen import build
from tvmify.dispatch import attempt
from tvmify.system.signals import HeldSignals, Interrupted, handle_signals

X = torch.ones(2, 4)


class TooLong(Exception):
    """Raised by a user's handler."""


@pytest.fixture
def time_limit() -> Iterator[None]:
    """Raise `TooLong` for SIGALRM."""

    def stop(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    yield
    assert signal.signal(signal.SIGALRM, before) is stop


def send(number: int) -> None:
    os.kill(os.getpid(), number)


STAGES = [
    (attempt, "capture"),
    (pipeline, "lower"),
    (pipeline, "schedule"),
    (build, "generate"),
    (build, "link"),
]


@pytest.mark.parametrize(("module", "name"), STAGES)
@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGALRM, TooLong)]
)
def test_a_signal_ends_the_call_and_the_next_one_compiles(
    module: Any,
    name: str,
    number: int,
    error: type[BaseException],
    time_limit: None,
    inference: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net: Any = decorate(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), cache=False)
    stage = getattr(module, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        send(number)
        return stage(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, interrupted)
        with pytest.raises(error):
            net(X)
    assert net.cache_info().entries == 0
    net(X)
    assert net.cache_info().entries == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def raised_in(callback: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call a function while TVM calls back into Python: in one of our passes."""
    rule = pipeline.schedule

    def schedule(*args: Any) -> Any:
        callback()
        return rule(*args)

    monkeypatch.setattr(pipeline, "schedule", schedule)


def test_non_raising_handler_has_no_effect(
    inference: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        net: Any = decorate(nn.Linear(4, 4).eval(), cache=False)
        raised_in(lambda: send(signal.SIGTERM), monkeypatch)
        net(X)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]
    assert net.cache_info().entries == 1


def test_a_second_interrupt_in_a_callback_is_no_reason_to_run_in_eager(
    inference: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    net: Any = decorate(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval(), cache=False)

    def interrupt() -> None:
        try:
            send(signal.SIGINT)
            send(signal.SIGINT)
        except KeyboardInterrupt as error:
            raise RuntimeError("TVM tells it so") from error

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        raised_in(interrupt, patch)
        net(X)
    net(X)
    assert net.cache_info().entries == 1


def test_signals_wait_for_the_next_stage(time_limit: None) -> None:
    reached = []
    with pytest.raises(TooLong), HeldSignals():
        send(signal.SIGALRM)
        reached.append("held")
        with HeldSignals():
            reached.append("inside")
        with pytest.raises(Interrupted):
            handle_signals()
        raise ValueError("what comes of it is no matter")
    assert reached == ["held", "inside"]
    handle_signals()


def test_pending_signals_are_handled_on_exit(time_limit: None) -> None:
    with pytest.raises(TooLong), HeldSignals():
        send(signal.SIGALRM)


def test_a_second_interrupt_does_not_wait() -> None:
    with pytest.raises(KeyboardInterrupt), HeldSignals():
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_other_threads_do_not_defer_signals(time_limit: None) -> None:
    handlers = []

    def hold() -> None:
        with HeldSignals():
            handlers.append(signal.getsignal(signal.SIGINT))
            handle_signals()

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_handler_set_during_deferral_is_kept() -> None:
    before = signal.getsignal(signal.SIGTERM)
    other = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with HeldSignals():
            signal.signal(signal.SIGTERM, other)
        assert signal.getsignal(signal.SIGTERM) is other
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def terminated() -> Iterator[list[int]]:
    """Record each SIGTERM."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, before)


def test_every_handler_runs_even_if_another_raises(terminated: list[int], time_limit: None) -> None:
    with pytest.raises((TooLong, KeyboardInterrupt)), HeldSignals():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            send(number)
        with pytest.raises(Interrupted):
            handle_signals()
        for number in (signal.SIGTERM, signal.SIGALRM):
            send(number)
    assert terminated


@pytest.mark.parametrize("place", ["enter", "exit"])
def test_an_interrupt_while_handlers_are_replaced_loses_no_other(
    place: str, terminated: list[int], time_limit: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT (2) with its own handler arrives while that of SIGHUP (1) or SIGTERM (15) is read."""
    at = signal.SIGHUP if place == "enter" else signal.SIGTERM
    look = signal.getsignal

    def interrupted(number: int) -> Any:
        if number == at:
            send(signal.SIGINT)
        return look(number)

    with pytest.raises(KeyboardInterrupt):
        if place == "enter":
            monkeypatch.setattr(signal, "getsignal", interrupted)
        with HeldSignals():
            monkeypatch.setattr(signal, "getsignal", interrupted)
    monkeypatch.undo()
    send(signal.SIGTERM)
    assert terminated == [signal.SIGTERM]
    with HeldSignals():
        send(signal.SIGTERM)
        assert terminated == [signal.SIGTERM], "nothing is held any more"
    assert terminated == [signal.SIGTERM] * 2
