"""A table of architectures of transformers, small and with random weights.

Each configuration class gets the settings of the table. Other settings keep the library's defaults,
caches and dropout included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]
#: The batch size, and the number of tokens per item.
Sizes = tuple[int, int]
Settings = dict[str, Any]

VOCABULARY = 96
IMAGE = 64  # pixels on each side


@dataclass(frozen=True)
class Architecture:
    """How to build one network, and arguments for it.

    Attributes
    ----------
    kind
        Its group in the report.
    configuration, network
        Names of classes of transformers.
    settings
        Settings of the configuration.
    inputs
        Draws the keyword arguments of a call; only the length of texts varies.
    """

    kind: str
    configuration: str
    network: str
    settings: Settings
    inputs: Callable[[Sizes], Inputs]

    def build(self) -> nn.Module:
        """Return the network with random weights, in evaluation mode."""
        import transformers

        configuration = getattr(transformers, self.configuration)(**self.settings)
        return with_lively_weights(getattr(transformers, self.network)(configuration)).eval()

    def call(self, network: Any, inputs: Inputs) -> Any:
        """Call the network with drawn arguments."""
        return network(**inputs)


@torch.no_grad()
def with_lively_weights(network: nn.Module) -> nn.Module:
    """Make every weight large enough to affect the result.

    With the initialization of transformers, attention is nearly uniform, biases are zero and
    normalizations do nothing: an error there would be lost in the tolerance.
    """
    for name, weight in network.named_parameters():
        if name.endswith("weight") and weight.dim() > 1:
            nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
        elif name.endswith("weight"):
            nn.init.uniform_(weight, 0.5, 1.5)
        elif name.endswith("bias"):
            nn.init.normal_(weight, std=0.1)
    for part in network.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(part.running_mean, std=0.1)  # type: ignore[arg-type]
            nn.init.uniform_(part.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    return network


def text(sizes: Sizes) -> Inputs:
    """Draw sentences; the second may be shorter by one or several tokens, and is padded."""
    batch, tokens = sizes
    mask = torch.ones(batch, tokens, dtype=torch.int64)
    mask[1, tokens - int(torch.randint(6, ())) :] = 0
    return {"input_ids": torch.randint(3, VOCABULARY, sizes), "attention_mask": mask}


def translation(sizes: Sizes) -> Inputs:
    """Draw source sentences, and the beginnings of target sentences."""
    return text(sizes) | {"decoder_input_ids": _beginnings(sizes)}


def image(sizes: Sizes) -> Inputs:
    """Draw images."""
    return {"pixel_values": torch.randn(sizes[0], 3, IMAGE, IMAGE)}


def image_and_text(sizes: Sizes) -> Inputs:
    """Draw sentences, and an image for each."""
    return text(sizes) | image(sizes)


def sound(sizes: Sizes) -> Inputs:
    """Draw waveforms of 0.2 s."""
    return {"input_values": torch.randn(sizes[0], 3200)}


def spectrogram(sizes: Sizes) -> Inputs:
    """Draw spectrograms of 64 steps with 16 bins."""
    return {"input_values": torch.randn(sizes[0], 64, 16)}


def speech(sizes: Sizes) -> Inputs:
    """Draw spectrograms of 64 steps, and the beginnings of sentences."""
    features = torch.randn(sizes[0], 16, 64)
    return {"input_features": features, "decoder_input_ids": _beginnings(sizes)}


def _beginnings(sizes: Sizes) -> Tensor:
    batch, tokens = sizes
    return torch.randint(3, VOCABULARY, (batch, tokens // 2 - 1))


_TOKENS: Settings = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LAYERS: Settings = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_TEXT: Settings = _TOKENS | _LAYERS | {"max_position_embeddings": 64}
_GROUPED: Settings = _TEXT | {"num_key_value_heads": 2}
_GPT: Settings = _TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_BOTH_SIDES: Settings = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "d_model": 32,
    "decoder_start_token_id": 1,
}
_TRANSLATION: Settings = _TOKENS | _BOTH_SIDES | {"max_position_embeddings": 64}
_PATCHES: Settings = _LAYERS | {"image_size": IMAGE, "patch_size": 16}
_STAGES: Settings = {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 24, 32]}
_WAVES: Settings = (
    _TOKENS
    | _LAYERS
    | {
        "conv_dim": [16] * 7,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
    }
)
_EXPERTS: Settings = _GROUPED | {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_CLIP_TEXT: Settings = _TEXT | {"projection_dim": 16}


def _encoder(prefix: str, network: str = "Model", **settings: Any) -> Architecture:
    return Architecture("encoder", f"{prefix}Config", prefix + network, settings, text)


def _decoder(prefix: str, network: str = "ForCausalLM", **settings: Any) -> Architecture:
    return Architecture("decoder", f"{prefix}Config", prefix + network, settings, text)


def _experts(prefix: str, **settings: Any) -> Architecture:
    name = f"{prefix}ForCausalLM"
    return Architecture("mixture of experts", f"{prefix}Config", name, settings, text)


def _translator(prefix: str, network: str = "ForConditionalGeneration", **s: Any) -> Architecture:
    return Architecture("encoder-decoder", f"{prefix}Config", prefix + network, s, translation)


def _vision(prefix: str, network: str = "ForImageClassification", **s: Any) -> Architecture:
    return Architecture("vision", f"{prefix}Config", prefix + network, s, image)


def _audio(
    prefix: str, network: str, inputs: Callable[[Sizes], Inputs], **settings: Any
) -> Architecture:
    return Architecture("audio", f"{prefix}Config", prefix + network, settings, inputs)


def _multimodal(prefix: str, network: str = "Model", **settings: Any) -> Architecture:
    return Architecture("multimodal", f"{prefix}Config", prefix + network, settings, image_and_text)


ARCHITECTURES = {
    "bert": _encoder("Bert", **_TEXT),
    "roberta": _encoder("Roberta", "ForSequenceClassification", **_TEXT),
    "distilbert": _encoder(
        "DistilBert", "ForMaskedLM", **_TOKENS, dim=32, n_layers=2, n_heads=4, hidden_dim=64
    ),
    "albert": _encoder("Albert", **_TEXT, embedding_size=16),
    "electra": _encoder(
        "Electra", "ForTokenClassification", **_TEXT, embedding_size=16, output_hidden_states=True
    ),
    "deberta_v2": _encoder(
        "DebertaV2",
        **_TEXT,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=16,
    ),
    "mpnet": _encoder("MPNet", **_TEXT),
    "modernbert": _encoder("ModernBert", **_TEXT, cls_token_id=1, sep_token_id=2),
    "xlnet": _encoder("XLNet", **_TOKENS, d_model=32, n_layer=2, n_head=4, d_inner=64),
    "longformer": _encoder("Longformer", **_TEXT, attention_window=[8, 8]),
    "fnet": Architecture(
        "encoder",
        "FNetConfig",
        "FNetModel",
        _TEXT,
        lambda sizes: {"input_ids": text(sizes)["input_ids"]},
    ),
    "gpt2": _decoder("GPT2", "LMHeadModel", **_GPT),
    "gpt_neo": _decoder(
        "GPTNeo",
        **_TOKENS,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
        max_position_embeddings=64,
    ),
    "gptj": _decoder("GPTJ", **_GPT, rotary_dim=4),
    "gpt_neox": _decoder("GPTNeoX", **_TEXT, output_hidden_states=True),
    "opt": _decoder("OPT", **_TEXT, ffn_dim=64, word_embed_proj_dim=32),
    "bloom": _decoder("Bloom", **_TOKENS, hidden_size=32, n_layer=2, n_head=4),
    "llama": _decoder("Llama", **_GROUPED),
    "mistral": _decoder("Mistral", **_GROUPED, sliding_window=8),
    "qwen2": _decoder("Qwen2", **_GROUPED),
    "qwen3": _decoder("Qwen3", **_GROUPED, head_dim=8),
    "gemma": _decoder("Gemma", **_GROUPED, head_dim=8),
    "gemma2": _decoder("Gemma2", **_GROUPED, head_dim=8, sliding_window=8),
    "phi": _decoder("Phi", **_TEXT),
    "phi3": _decoder("Phi3", **_GROUPED),
    "falcon": _decoder("Falcon", **_TOKENS | _LAYERS),
    "stablelm": _decoder("StableLm", **_GROUPED),
    "olmo": _decoder("Olmo", **_GROUPED),
    "mamba": _decoder("Mamba", **_TOKENS, hidden_size=32, num_hidden_layers=2, state_size=4),
    "mixtral": _experts("Mixtral", **_GROUPED, num_local_experts=4),
    "qwen2_moe": _experts("Qwen2Moe", **_EXPERTS, shared_expert_intermediate_size=32),
    "t5": _translator("T5", **_TOKENS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4),
    "bart": _translator(
        "Bart", **_TRANSLATION, output_attentions=True, attn_implementation="eager"
    ),
    "mbart": _translator("MBart", **_TRANSLATION),
    "pegasus": _translator("Pegasus", **_TRANSLATION),
    "marian": _translator("Marian", "MTModel", **_TRANSLATION),
    "m2m_100": _translator("M2M100", **_TRANSLATION),
    "vit": _vision("ViT", **_PATCHES),
    "deit": _vision("DeiT", **_PATCHES),
    "beit": _vision("Beit", **_PATCHES, use_relative_position_bias=True, output_hidden_states=True),
    "dinov2": _vision("Dinov2", **_PATCHES),
    "swin": _vision(
        "Swin",
        image_size=IMAGE,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    "convnext": _vision("ConvNext", **_STAGES),
    "convnextv2": _vision("ConvNextV2", **_STAGES),
    "resnet": _vision("ResNet", **_STAGES, embedding_size=8),
    "regnet": _vision("RegNet", **_STAGES, embedding_size=8, groups_width=8),
    "mobilenet_v2": _vision("MobileNetV2", image_size=IMAGE, depth_multiplier=0.35),
    "efficientnet": _vision(
        "EfficientNet",
        image_size=IMAGE,
        width_coefficient=0.25,
        depth_coefficient=0.3,
        hidden_dim=320,
    ),
    "mobilevit": _vision(
        "MobileViT",
        image_size=IMAGE,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64],
        num_attention_heads=2,
    ),
    "segformer": _vision(
        "Segformer",
        "ForSemanticSegmentation",
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
    ),
    "yolos": _vision("Yolos", "ForObjectDetection", **_LAYERS, image_size=[64, 64], patch_size=16),
    "whisper": _audio(
        "Whisper",
        "ForConditionalGeneration",
        speech,
        **_TOKENS | _BOTH_SIDES,
        num_mel_bins=16,
        max_source_positions=32,
        max_target_positions=16,
    ),
    "wav2vec2": _audio("Wav2Vec2", "ForCTC", sound, **_WAVES),
    "hubert": _audio("Hubert", "Model", sound, **_WAVES),
    "wavlm": _audio("WavLM", "Model", sound, **_WAVES),
    "audio_spectrogram_transformer": _audio(
        "AST",
        "ForAudioClassification",
        spectrogram,
        **_LAYERS,
        patch_size=8,
        frequency_stride=4,
        time_stride=8,
        max_length=64,
        num_mel_bins=16,
    ),
    "clip": _multimodal("CLIP", text_config=_CLIP_TEXT, vision_config=_PATCHES, projection_dim=16),
    "siglip": _multimodal("Siglip", text_config=_TEXT, vision_config=_PATCHES),
    "vilt": _multimodal("Vilt", **_TEXT | _PATCHES, max_image_length=-1),
}
