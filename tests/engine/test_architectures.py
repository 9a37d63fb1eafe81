"""Architectures of the transformers package, with random weights and tiny configurations."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from consilience import Agreement, AndMask
from oracle import SINGLE, check, wavy

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # third parties' imports deprecate one another
    transformers = pytest.importorskip("transformers")

text = {
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
}
still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
picture = {"image_size": 8, "patch_size": 4, "num_channels": 2}


def last_hidden(model: nn.Module, x: Tensor) -> Tensor:
    return wavy(model(x).last_hidden_state)


def last_hidden_of_sound(model: nn.Module, x: Tensor) -> Tensor:
    # The model asks its input for a gradient by itself, which it can of a leaf alone.
    return wavy(model(x.detach()).last_hidden_state)


def logits(model: nn.Module, x: Tensor) -> Tensor:
    return wavy(model(x).logits)


def words(length: int) -> Callable[[int, torch.Generator], Any]:
    return lambda rows, g: (torch.randint(3, 11, (rows, length), generator=g),)


def images(size: int = 8, channels: int = 2) -> Callable[[int, torch.Generator], Any]:
    shape = (channels, size, size)
    return lambda rows, g: (torch.randn((rows, *shape), generator=g, dtype=torch.float64),)


def bert(**more: Any) -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**text, **still, **more))


def roberta() -> nn.Module:
    return transformers.RobertaModel(transformers.RobertaConfig(**text, **still, pad_token_id=1))


def distilbert() -> nn.Module:
    return transformers.DistilBertModel(
        transformers.DistilBertConfig(
            vocab_size=11,
            dim=8,
            n_layers=1,
            n_heads=2,
            hidden_dim=12,
            max_position_embeddings=16,
            dropout=0.0,
            attention_dropout=0.0,
        )
    )


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=11,
            n_positions=16,
            n_embd=8,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**text, num_key_value_heads=1, use_cache=False)
    )


def t5() -> nn.Module:
    return transformers.T5Model(
        transformers.T5Config(
            vocab_size=11,
            d_model=8,
            d_kv=4,
            d_ff=12,
            num_layers=1,
            num_decoder_layers=1,
            num_heads=2,
            relative_attention_num_buckets=4,
            dropout_rate=0.0,
            use_cache=False,
        )
    )


def t5_losses(model: nn.Module, x: Tensor) -> Tensor:
    return wavy(model(input_ids=x, decoder_input_ids=x[:, :2]).last_hidden_state)


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=12,
            **still,
            **picture,
        )
    )


def resnet() -> nn.Module:
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            num_channels=2,
            embedding_size=4,
            hidden_sizes=[4, 6],
            depths=[1, 1],
            layer_type="basic",
        )
    )


def convnext() -> nn.Module:
    return transformers.ConvNextForImageClassification(
        transformers.ConvNextConfig(
            num_channels=2, hidden_sizes=[4, 6], depths=[1, 1], num_stages=2, patch_size=2
        )
    )


def swin() -> nn.Module:
    return transformers.SwinForImageClassification(
        transformers.SwinConfig(
            image_size=8,
            patch_size=2,
            num_channels=2,
            embed_dim=4,
            depths=[2, 1],
            num_heads=[1, 2],
            window_size=2,
            drop_path_rate=0.0,
            **still,
        )
    )


def wav2vec2() -> nn.Module:
    return transformers.Wav2Vec2Model(
        transformers.Wav2Vec2Config(
            vocab_size=11,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=12,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            feat_proj_dropout=0.0,
            activation_dropout=0.0,
            layerdrop=0.0,
            conv_dim=(4, 4),
            conv_stride=(3, 2),
            conv_kernel=(4, 3),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            apply_spec_augment=False,
        )
    )


def causal(kind: str, **more: Any) -> nn.Module:
    """Return a small causal language model."""
    config = getattr(transformers, f"{kind}Config")(**{**text, "use_cache": False, **more})
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model


def experts(kind: str, **more: Any) -> nn.Module:
    chosen = {"num_experts_per_tok": 2, "num_key_value_heads": 1}
    return causal(kind, experts_implementation="eager", **chosen, **more)


def encoder(kind: str, **more: Any) -> nn.Module:
    """Return a small encoder of words."""
    config = getattr(transformers, f"{kind}Config")(**{**text, **still, **more})
    model: nn.Module = getattr(transformers, f"{kind}Model")(config)
    return model


def deberta() -> nn.Module:
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    return encoder("DebertaV2", **relative, position_buckets=4, max_relative_positions=8)


def xlnet() -> nn.Module:
    return transformers.XLNetModel(
        transformers.XLNetConfig(
            vocab_size=11, d_model=8, n_layer=2, n_head=2, d_inner=12, dropout=0.0
        )
    )


def switch() -> nn.Module:
    return transformers.SwitchTransformersModel(
        transformers.SwitchTransformersConfig(
            vocab_size=11,
            d_model=8,
            d_kv=4,
            d_ff=12,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=2,
            relative_attention_num_buckets=4,
            dropout_rate=0.0,
            use_cache=False,
            num_experts=2,
            router_jitter_noise=0.0,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
        )
    )


def whisper() -> nn.Module:
    sizes = {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": 12 for side in ("encoder", "decoder")}
    sizes |= {"encoder_layers": 1, "decoder_layers": 1, "d_model": 8, "num_mel_bins": 4}
    return transformers.WhisperModel(
        transformers.WhisperConfig(
            vocab_size=11,
            max_source_positions=6,
            max_target_positions=8,
            dropout=0.0,
            pad_token_id=1,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            use_cache=False,
            apply_spec_augment=False,
            **sizes,
        )
    )


def whisper_losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return wavy(model(x, decoder_input_ids=y).last_hidden_state)


def spectrum_and_words(rows: int, g: torch.Generator) -> Any:
    return torch.randn(rows, 4, 12, generator=g, dtype=torch.float64), *words(5)(rows, g)


def clip() -> nn.Module:
    tower = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower |= {"intermediate_size": 12, "projection_dim": 6}
    return transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**text, **tower, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
            vision_config={**tower, **picture},
            projection_dim=6,
        )
    )


def clip_towers(model: Any, x: Tensor, y: Tensor) -> Tensor:
    seen = model.visual_projection(model.vision_model(pixel_values=y).pooler_output)
    return wavy(model.text_projection(model.text_model(input_ids=x).pooler_output)) + wavy(seen)


def words_and_images(rows: int, g: torch.Generator) -> Any:
    return *words(5)(rows, g), *images()(rows, g)


def segformer() -> nn.Module:
    return transformers.SegformerForImageClassification(
        transformers.SegformerConfig(
            num_channels=2,
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[4, 8],
            patch_sizes=[3, 3],
            strides=[2, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            drop_path_rate=0.0,
            classifier_dropout_prob=0.0,
            **still,
        )
    )


def swin_v2() -> nn.Module:
    return transformers.Swinv2ForImageClassification(
        transformers.Swinv2Config(
            image_size=8,
            patch_size=2,
            num_channels=2,
            embed_dim=4,
            depths=[2, 1],
            num_heads=[1, 2],
            window_size=2,
            drop_path_rate=0.0,
            **still,
        )
    )


def beit() -> nn.Module:
    return transformers.BeitForImageClassification(
        transformers.BeitConfig(
            vocab_size=11,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=12,
            drop_path_rate=0.0,
            use_relative_position_bias=True,
            **picture,
            **still,
        )
    )


def mamba() -> nn.Module:
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(
            vocab_size=11,
            hidden_size=8,
            state_size=4,
            num_hidden_layers=1,
            conv_kernel=3,
            intermediate_size=16,
            time_step_rank=4,
            use_cache=False,
        )
    )


def sound(rows: int, g: torch.Generator) -> Any:
    return (torch.randn(rows, 40, generator=g, dtype=torch.float64),)


MODELS: dict[str, tuple[Any, ...]] = {
    "BERT": (bert, words(5), last_hidden),
    "BERT, eager attention": (lambda: bert(attn_implementation="eager"), words(5), last_hidden),
    "BERT, as many tokens as rows": (bert, words(7), last_hidden),
    "RoBERTa": (roberta, words(5), last_hidden),
    "DistilBERT": (distilbert, words(5), last_hidden),
    "GPT-2": (gpt2, words(5), logits),
    "GPT-2, as many tokens as rows": (gpt2, words(7), logits),
    "Llama": (llama, words(5), logits),
    "T5": (t5, words(5), t5_losses),
    "ViT": (vit, images(), logits),
    "ConvNeXt": (convnext, images(), logits),
    "Swin": (swin, images(), logits),
    "wav2vec 2.0": (wav2vec2, sound, last_hidden_of_sound),
    "Mistral": (lambda: causal("Mistral", num_key_value_heads=1, head_dim=4), words(5), logits),
    "Mixtral": (lambda: experts("Mixtral", num_local_experts=3, head_dim=4), words(5), logits),
    "Switch": (switch, words(5), t5_losses),
    "GPT-NeoX": (lambda: causal("GPTNeoX"), words(5), logits),
    "BLOOM": (lambda: causal("Bloom", hidden_dropout=0.0, n_head=2, n_layer=1), words(5), logits),
    "OPT": (lambda: causal("OPT", ffn_dim=12, dropout=0.0, pad_token_id=1), words(5), logits),
    "Mamba": (mamba, words(5), logits),
    "ALBERT": (lambda: encoder("Albert", embedding_size=4), words(5), last_hidden),
    "DeBERTa": (deberta, words(5), last_hidden),
    "XLNet": (xlnet, words(5), last_hidden),
    "XLNet, as many tokens as rows": (xlnet, words(7), last_hidden),
    "Longformer": (
        lambda: encoder(
            "Longformer", max_position_embeddings=20, attention_window=4, pad_token_id=1
        ),
        words(8),
        last_hidden,
    ),
    "Whisper": (whisper, spectrum_and_words, whisper_losses),
    "CLIP, its towers": (clip, words_and_images, clip_towers),
    "SegFormer": (segformer, images(), logits),
    "Swin v2": (swin_v2, images(), logits),
    "BEiT": (beit, images(), logits),
}

THROUGH_FLOAT32 = {"Mamba", "Switch"}
"""They compute a part in float32, whatever the model's precision."""
LABELS = [2, 0, 2, -1, 1, 0, 2]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("env", [LABELS, None], ids=["labels", "each row"])
@pytest.mark.parametrize("name", MODELS)
def test_architecture_in_train_mode_without_dropout(name: str, env: Any) -> None:
    build, batch, losses = MODELS[name]
    check(
        lambda: build().train(),
        batch,
        env,
        rows=7 if env else 3,
        loss=losses,
        strict_zeros=False,
        coarser=SINGLE if name in THROUGH_FLOAT32 else 1.0,
    )


@pytest.mark.filterwarnings("ignore")
def test_resnet_in_eval() -> None:
    check(lambda: resnet().eval(), images(), LABELS, loss=logits)


@pytest.mark.filterwarnings("ignore")
def test_resnet_in_train_rows_of_the_joint_gradient() -> None:
    check(
        lambda: resnet().train(),
        images(),
        LABELS,
        loss=logits,
        oracle="uses",
        strict_zeros=False,
        batchnorm="joint",
    )


@pytest.mark.filterwarnings("ignore")
def test_resnet_in_train_each_environment_by_itself() -> None:
    check(
        lambda: resnet().train(),
        images(),
        [2, 0, 2, 1, 1, 0, 2],
        loss=logits,
        oracle="alone",
        same_forward=False,
        strict_zeros=False,
        batchnorm="per_environment",
    )


@pytest.mark.filterwarnings("ignore")
def test_bert_with_padding() -> None:
    def padded(model: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(x.shape[1]) < lengths[:, None]).long()
        return wavy(model(input_ids=x, attention_mask=mask).last_hidden_state * mask[:, :, None])

    def batch(rows: int, g: torch.Generator) -> Any:
        return *words(5)(rows, g), torch.randint(2, 6, (rows,), generator=g)

    check(bert, batch, LABELS, loss=padded, strict_zeros=False)


@pytest.mark.filterwarnings("ignore")
def test_clip_compares_rows_which_couples_them() -> None:
    def losses(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return wavy(model(input_ids=x, pixel_values=y).logits_per_text)

    with pytest.raises(RuntimeError, match=r"logit_scale.*agreement\.backward"):
        check(clip, words_and_images, LABELS, loss=losses)


@pytest.mark.filterwarnings("ignore")
def test_grouped_products_of_experts_are_refused() -> None:
    def build() -> nn.Module:
        return causal(
            "Mixtral",
            num_local_experts=3,
            num_experts_per_tok=2,
            num_key_value_heads=1,
            hidden_size=16,
            intermediate_size=16,
            experts_implementation="grouped_mm",
        )

    model, x = build(), torch.randint(3, 11, (7, 5))
    agreement = Agreement(model, AndMask(1.0))
    with (
        pytest.raises(RuntimeError, match=r"experts.*agreement\.backward"),
        agreement.observe(LABELS),
    ):
        model(x)
