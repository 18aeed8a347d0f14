"""Whole models through the decorator, with real weights if a package contains them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.models import minilm_folder, resnet18
from tests.tolerances import assert_close_to_reference
from tvmify import tvmify


def test_resnet(inference: None) -> None:
    net: Any = resnet18()
    net.blocks = net.blocks[::2]  # one for each number of channels and each stride
    fast: Any = tvmify(net, strict=True)
    x = torch.randn(2, 3, 64, 96)
    assert_close_to_reference(fast(x), net, (x,))
    assert "without a schedule: 0" in str(fast.explain())


def test_mlp(inference: None) -> None:
    net = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10), nn.Softmax(-1)).eval()
    fast: Any = tvmify(net, strict=True)
    for rows in (1, 7):
        x = torch.randn(rows, 512)
        assert_close_to_reference(fast(x), net, (x,))


def test_minilm_with_its_real_weights(inference: None) -> None:
    folder = minilm_folder()
    transformers = pytest.importorskip("transformers")
    net = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    sentences = ["TVM compiles tensors.", "A cat sleeps in the afternoon sun."]
    tokens = dict(tokenizer(sentences, padding=True, return_tensors="pt"))
    del net.encoder.layer[2:]  # all have the same kernels
    fast: Any = tvmify(net, strict=True)
    assert_close_to_reference(fast(**tokens), net, (), tokens)
    assert "captured by: export" in str(fast.explain())


def test_hidden_states_collected_by_hooks(inference: None) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 16, "embedding_size": 16, "intermediate_size": 16}
    config = transformers.ElectraConfig(num_hidden_layers=2, num_attention_heads=2, **sizes)
    torch.manual_seed(0)
    net = transformers.ElectraModel(config).eval()
    fast: Any = tvmify(copy.deepcopy(net), strict=True)
    tokens = torch.randint(50, (1, 7))
    for _ in range(2):  # the first call adds the hooks
        found = fast(tokens, output_hidden_states=True)
        expected = net(tokens, output_hidden_states=True)
        assert len(found.hidden_states) == 3
        for state, other in zip(found.hidden_states, expected.hidden_states, strict=True):
            torch.testing.assert_close(state, other)
