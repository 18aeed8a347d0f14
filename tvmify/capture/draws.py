"""Whether code may draw random numbers, even unused ones. TorchScript drops unused draws when it
compiles, so the graph alone does not show them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tvmify.capture.questions import names_in

#: Functions and methods that may draw, as code calls them.
_NAMES = frozenset(
    """rand randn randint randperm rand_like randn_like randint_like bernoulli bernoulli_ binomial
    multinomial normal normal_ poisson uniform_ random_ exponential_ geometric_ cauchy_ log_normal_
    trunc_normal_ kaiming_normal_ kaiming_uniform_ xavier_normal_ xavier_uniform_ orthogonal_
    dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout feature_dropout
    feature_alpha_dropout native_dropout rrelu rrelu_ rrelu_with_noise fractional_max_pool2d
    fractional_max_pool3d fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices
    gumbel_softmax scaled_dot_product_attention multi_head_attention_forward standard_gamma
    _standard_gamma _sample_dirichlet sample rsample sample_n lstm gru rnn_tanh rnn_relu""".split()
)


def may_draw(callable_: Any, operators: Iterable[str]) -> bool:
    """Whether a module or function may draw; true if in doubt.

    Parameters
    ----------
    callable_
        The plain module or function; None where there is only TorchScript.
    operators
        Those of its program, such as ``aten::rand``.
    """
    drawn = _NAMES.intersection(name.removeprefix("aten::") for name in operators)
    return bool(drawn or (callable_ is not None and _NAMES & names_in(callable_)))
