"""Architectures of `transformers` from tiny random configurations: every covered row is right, or left out and said.

At two lengths, one of which is the batch's size: there positions look like examples.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heeler.sketch import Sketcher

transformers = pytest.importorskip("transformers")

BATCH = 4
TEXT = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TEXT, "num_key_value_heads": 1, "head_dim": 8}
BART = {
    "vocab_size": 30,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
T5 = {
    "vocab_size": 30,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
VISION = {
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
SPEECH = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": [8, 8],
    "conv_stride": [3, 2],
    "conv_kernel": [4, 2],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "vocab_size": 12,
    "apply_spec_augment": False,
}
GPT2 = {"vocab_size": 30, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
BLOOM = {"vocab_size": 30, "hidden_size": 16, "n_layer": 2, "n_head": 2}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    # decoders
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", "text", GPT2),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", "text", GROUPED),
    "Mistral": ("MistralForCausalLM", "MistralConfig", "text", GROUPED),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", "text", GROUPED),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", "text", GROUPED),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", "text", GROUPED),
    "Gemma2": ("Gemma2ForCausalLM", "Gemma2Config", "text", GROUPED),
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", "text", GROUPED),
    "OPT": ("OPTForCausalLM", "OPTConfig", "text", {**TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", "text", TEXT),
    "Phi": ("PhiForCausalLM", "PhiConfig", "text", TEXT),
    "Phi3": ("Phi3ForCausalLM", "Phi3Config", "text", {**TEXT, "num_key_value_heads": 1}),
    "Bloom": ("BloomForCausalLM", "BloomConfig", "text", BLOOM),
    "Falcon": ("FalconForCausalLM", "FalconConfig", "text", TEXT),
    "StableLM": ("StableLmForCausalLM", "StableLmConfig", "text", {**TEXT, "num_key_value_heads": 2}),
    "OLMo": ("OlmoForCausalLM", "OlmoConfig", "text", TEXT),
    # mixtures of experts
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", "text", {**GROUPED, "num_local_experts": 3}),
    "Qwen2-MoE": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        "text",
        {
            **TEXT,
            "num_key_value_heads": 2,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
        },
    ),
    "Switch": (
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        "pairs",
        {**T5, "num_experts": 3},
    ),
    # state spaces
    "Mamba": ("MambaForCausalLM", "MambaConfig", "text", {**TEXT, "state_size": 4}),
    "Mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        "text",
        {**TEXT, "state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    ),
    # encoders
    "BERT": ("BertForMaskedLM", "BertConfig", "text", TEXT),
    "RoBERTa": ("RobertaForMaskedLM", "RobertaConfig", "text", TEXT),
    "DistilBERT": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        "text",
        {"vocab_size": 30, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 32},
    ),
    "ELECTRA": ("ElectraForPreTraining", "ElectraConfig", "text", {**TEXT, "embedding_size": 8}),
    "ALBERT": ("AlbertForMaskedLM", "AlbertConfig", "text", {**TEXT, "embedding_size": 8}),
    "DeBERTa-v2": (
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        "text",
        {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "MPNet": ("MPNetForMaskedLM", "MPNetConfig", "text", TEXT),
    "XLNet": ("XLNetLMHeadModel", "XLNetConfig", "text", {**BLOOM, "d_model": 16, "d_inner": 24}),
    # encoders with decoders
    "T5": ("T5ForConditionalGeneration", "T5Config", "pairs", T5),
    "BART": ("BartForConditionalGeneration", "BartConfig", "pairs", BART),
    "Pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", "pairs", BART),
    # vision
    "ViT": ("ViTForImageClassification", "ViTConfig", "images", VISION),
    "BEiT": ("BeitForImageClassification", "BeitConfig", "images", VISION),
    "Swin": (
        "SwinForImageClassification",
        "SwinConfig",
        "images",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    ),
    "ConvNeXt": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        "images",
        {**STAGES, "num_stages": 2, "patch_size": 2},
    ),
    "ResNet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        "images",
        {**STAGES, "embedding_size": 8, "layer_type": "basic"},
    ),
    # speech
    "Wav2Vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", "speech", SPEECH),
    "HuBERT": ("HubertForCTC", "HubertConfig", "speech", SPEECH),
    "Whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        "whisper",
        {**BART, "num_mel_bins": 6, "max_source_positions": 5, "max_target_positions": 32},
    ),
}
FEW = ["GPT-2", "Gemma3", "Mixtral", "BERT", "T5", "ViT"]


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model_class, config_class, _, options = MODELS[name]
    config = getattr(transformers, config_class)(**options)
    model = getattr(transformers, model_class)(config)
    for p in model.parameters():  # tiny initial weights would hide what is wrong
        if p.ndim > 1:
            nn.init.normal_(p, 0.0, 0.3)
    return model.eval()  # type: ignore[no-any-return]


def inputs(name: str, length: int) -> dict[str, Tensor]:
    kind, size = MODELS[name][2], MODELS[name][3].get("image_size", 8)
    if kind == "images":
        return {"pixel_values": torch.randn(BATCH, 3, size, size)}
    if kind == "speech":
        return {"input_values": torch.randn(BATCH, 8 + 6 * length)}
    ids = torch.randint(3, 30, (BATCH, length))
    if kind == "whisper":
        return {"input_features": torch.randn(BATCH, 6, 10), "decoder_input_ids": ids}
    if kind == "pairs":
        return {"input_ids": torch.randint(3, 30, (BATCH, length + 1)), "decoder_input_ids": ids}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = model(**batch).logits.float()
    weights = torch.linspace(0.5, 1.5, out[0].numel()).reshape(out[0].shape)
    return (weights * out.sin()).flatten(1).sum(1)  # type: ignore[no-any-return]


def judge(name: str, length: int, caplog: pytest.LogCaptureFixture) -> Counter[str]:
    model = build(name)
    alone = copy.deepcopy(model)
    sketcher = Sketcher(model, exact=True, layers="all")
    at_attach, count = sketcher.coverage, Counter[str]()
    for _ in range(2):
        batch = inputs(name, length)
        caplog.clear()
        out_before = set(sketcher.left_out)
        losses(model, batch).mean().backward()
        rows = sketcher.pop()
        assert bool(caplog.records) or set(sketcher.left_out) == out_before
        truth: dict[str, list[Tensor]] = {n: [] for n, _ in alone.named_parameters()}
        for i in range(BATCH):
            alone.zero_grad()
            losses(alone, {key: value[i : i + 1] for key, value in batch.items()}).sum().backward()
            for n, p in alone.named_parameters():
                truth[n].append((torch.zeros_like(p) if p.grad is None else p.grad).flatten())
        left, start = sketcher.coverage.left_out, 0
        scale = sum(float(torch.stack(parts).norm()) for parts in truth.values())
        for line in at_attach.lines:
            if line.rule is None:
                continue
            mine, start = rows[:, start : start + line.size], start + line.size
            own = torch.stack(truth[line.parameter])
            if line.parameter in left:
                count["left out"] += 1
                continue
            error = float((mine - own).norm())
            right = error <= 1e-3 * float(own.norm()) + 1e-5 * scale
            assert right, f"{name}, length {length}: {line.parameter} is off by {error / float(own.norm()):.3f}"
            count["right"] += 1
    sketcher.detach()
    print(name, length, dict(count), sketcher.left_out)
    return count


IGNORED = pytest.mark.filterwarnings("ignore", "error::heeler.HeelerWarning")  # the latter go to the log


@IGNORED
@pytest.mark.parametrize("length", [BATCH, 6])
@pytest.mark.parametrize("name", FEW)
def test_some_architectures(name: str, length: int, caplog: pytest.LogCaptureFixture) -> None:
    count = judge(name, length, caplog)
    assert count["right"] > 2 * count["left out"]


@IGNORED
@pytest.mark.slow
@pytest.mark.parametrize("length", [BATCH, 6])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in FEW])
def test_architectures(name: str, length: int, caplog: pytest.LogCaptureFixture) -> None:
    count = judge(name, length, caplog)
    assert count["right"] > 0
