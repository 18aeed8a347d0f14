from __future__ import annotations

import threading
import warnings

import pytest

from tvmify.torch_compat.silence import silenced


def test_silence_is_per_thread() -> None:
    before = list(warnings.filters)  # type: ignore[attr-defined]
    inside, go_on = threading.Event(), threading.Event()

    def silent() -> None:
        with silenced():
            warnings.warn("of the thread", UserWarning, stacklevel=1)
            inside.set()
            go_on.wait(60)

    thread = threading.Thread(target=silent)
    thread.start()
    assert inside.wait(60)
    with pytest.warns(UserWarning, match="of the test"):
        warnings.warn("of the test", UserWarning, stacklevel=1)
    go_on.set()
    thread.join(60)
    assert warnings.filters == before  # type: ignore[attr-defined]


def test_leftover_filter_is_inert() -> None:
    context = silenced()
    context.__enter__()
    with warnings.catch_warnings():  # as another thread would
        context.__exit__(None, None, None)
    with pytest.raises(UserWarning):
        warnings.warn("an error again", UserWarning, stacklevel=1)
    warnings.filters.pop(0)  # type: ignore[attr-defined]


def test_an_error_passes_through() -> None:
    with pytest.raises(KeyError), silenced():
        raise KeyError
    with pytest.raises(UserWarning):
        warnings.warn("an error", UserWarning, stacklevel=1)
