"""The labelled set: models of many families, and what is in them by the word of their own modules.

A label is the class of a module, or the end of its path with a dot in front. One call of a labelled module is one
structure; what the patterns find is held against these calls, one by one. Nothing here looks at a graph's operations.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import djinn
from djinn_plugins.graph.graph import RecordedGraph

transformers = pytest.importorskip("transformers")

DEVICE = "remote_accelerator:0"
VOCABULARY = 99
_SMALL = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4}
_VISION = {**_SMALL, "image_size": 32, "patch_size": 8}
_ENCODER = {**_SMALL, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@attrs.frozen
class Call:
    """One call of a labelled module: from where to where in the recorded nodes it went."""

    path: str
    kind: str
    """Class of the module."""
    start: int
    end: int


@attrs.frozen(eq=False)
class Family:
    """One model of a family, its inputs, and the labels of its modules."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]
    attention: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ()
    moe: tuple[str, ...] = ()
    recurrent: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    decodes: bool = False
    """Whether it writes text, token by token, with a cache."""
    has_static_cache: bool = True
    """Whether the cache may be one of fixed size as well."""
    wholes: Mapping[str, int] = attrs.field(factory=dict)
    """How many language models and vision encoders one call of it runs."""
    is_grouped: bool = False
    is_hand_written: bool = False
    heads: tuple[int, ...] = (4,)
    """Numbers of heads that its configuration names."""

    def model(self, seed: int = 0) -> nn.Module:
        """Make it with random weights, ready to be used."""
        torch.manual_seed(seed)
        return self.make().eval()

    def next_inputs(self, inputs: Mapping[str, torch.Tensor], output: Any) -> dict[str, Any]:
        """Make the inputs of the step behind a call: one more token, and what an encoder has found."""
        token = torch.ones_like(inputs["decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"][:, :1])
        found = getattr(output, "encoder_last_hidden_state", None)
        if found is None:
            return {"input_ids": token}
        return {"encoder_outputs": (found,), "decoder_input_ids": token}

    def is_causal(self, call: Call) -> bool:
        """Whether one call of a labelled attention lets each position see no later one."""
        if not self.wholes.get("llm"):
            return "text_model" in call.path
        is_encoder = re.search(r"encoder\.|vision", call.path) is not None and "decoder." not in call.path
        return not is_encoder and not is_cross(call)


def is_cross(call: Call) -> bool:
    """Whether one call of a labelled attention looks at another sequence."""
    return re.search(r"encoder_attn|EncDecAttention|CrossAttention", f"{call.path} {call.kind}") is not None


def cached_tensors(cache: Any) -> int:
    """Count the tensors that a cache of transformers holds."""
    own = getattr(cache, "self_attention_cache", cache)
    return 2 * sum(layer.is_initialized for layer in own.layers) + read_only_tensors(cache)


def cache_buffers(model: nn.Module) -> int:
    """Count the buffers of a model of its own that are caches by their name."""
    return sum("cache" in name for name, _ in model.named_buffers())


def read_only_tensors(cache: Any) -> int:
    """Count those that are written once, from what an encoder has found."""
    cross = getattr(cache, "cross_attention_cache", None)
    return 0 if cross is None else 2 * sum(layer.is_initialized for layer in cross.layers)


def _ids(length: int = 7, batch: int = 1) -> torch.Tensor:
    return torch.arange(3, 3 + length * batch).reshape(batch, length) % VOCABULARY


def _text() -> dict[str, torch.Tensor]:
    return {"input_ids": _ids()}


def _masked_text() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, :2] = 0
    return {"input_ids": _ids(batch=2), "attention_mask": mask}


def _pixels(size: int = 32) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.linspace(-1, 1, 2 * 3 * size * size).reshape(2, 3, size, size)}


def _two_texts() -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(), "decoder_input_ids": _ids(5)}


def _decoder(name: str, stem: str, *, mlp: tuple[str, ...] = (), **changes: Any) -> Family:
    """A decoder of transformers whose modules are called by the usual scheme."""
    fields = {key: changes.pop(key) for key in ("moe", "attention", "has_static_cache") if key in changes}
    config = {**_DECODER, **changes}
    grouped = config.get("num_key_value_heads", config["num_attention_heads"]) != config["num_attention_heads"]

    def make() -> nn.Module:
        settings = getattr(transformers, f"{stem}Config")(**config)
        if "moe" in fields:
            settings._experts_implementation = "eager"
        model: nn.Module = getattr(transformers, f"{stem}ForCausalLM")(settings)
        return model

    return Family(name, make, _text, **{
        "attention": (f"{stem}Attention",), "mlp": mlp or (f"{stem}MLP",), "head": (".lm_head",), "decodes": True,
        "wholes": {"llm": 1}, "is_grouped": grouped, **fields})


def gpt2(layers: int = 12, **config: Any) -> nn.Module:
    """GPT-2 of as many layers, narrow."""
    settings = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 48, "n_head": 4, "n_layer": layers, **config}
    model: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))
    return model


def _t5(**changes: Any) -> nn.Module:
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=112, num_layers=2, num_heads=4,
                                   decoder_start_token_id=0, **changes)
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model


def _bart() -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=112, decoder_ffn_dim=112, max_position_embeddings=64)
    model: nn.Module = transformers.BartForConditionalGeneration(config)
    return model


def _whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=112, decoder_ffn_dim=112, num_mel_bins=16, max_source_positions=20,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    model: nn.Module = transformers.WhisperForConditionalGeneration(config)
    return model


def _clip() -> nn.Module:
    text = {**_ENCODER, "projection_dim": 32, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    config = transformers.CLIPConfig(text_config=text, vision_config={**_VISION, "projection_dim": 32},
                                     projection_dim=32)
    model: nn.Module = transformers.CLIPModel(config)
    return model


def _llava() -> nn.Module:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_VISION),
        text_config=transformers.LlamaConfig(**_DECODER), image_token_index=5)
    model: nn.Module = transformers.LlavaForConditionalGeneration(config)
    return model


def _image_and_text() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[7, 8, *[5] * 16, 9, 10]])
    return {"input_ids": ids, "pixel_values": _pixels()["pixel_values"][:1]}


def _wav2vec2() -> nn.Module:
    config = transformers.Wav2Vec2Config(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=112,
        conv_dim=(16, 16, 16), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3), num_feat_extract_layers=3,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4)
    model: nn.Module = transformers.Wav2Vec2Model(config)
    return model


def _detr() -> nn.Module:
    backbone = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_channels=3,
                                         out_features=["stage2"], layer_type="basic")
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=32,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, num_queries=6)
    model: nn.Module = transformers.DetrModel(config)
    return model


def _of(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return made

    return make


class HandWrittenGPT(nn.Module):
    """Attention as in a tutorial: products, a lower triangle, softmax, products."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(HandWrittenBlock(width, heads) for _ in range(layers))
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


class HandWrittenAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, -1))
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        allowed = torch.tril(torch.ones(length, length, device=x.device))
        weights = scores.masked_fill(allowed == 0, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class HandWrittenMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)).square())


class HandWrittenBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention, self.mlp = HandWrittenAttention(width, heads), HandWrittenMLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class OwnRMSNorm(nn.Module):
    """Root mean square, with a division where others multiply by the inverse."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * (x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6))


class PresetCacheAttention(nn.Module):
    """Grouped queries, and a cache of fixed size that is written by slices."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, size = heads, kv_heads, width // heads
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, kv_heads * size, bias=False) for _ in range(2))
        self.register_buffer("cache_k", torch.zeros(1, 32, kv_heads, size))
        self.register_buffer("cache_v", torch.zeros(1, 32, kv_heads, size))

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        batch, length, width = x.shape
        q = self.wq(x).view(batch, length, self.heads, -1)
        k, v = (layer(x).view(batch, length, self.kv_heads, -1) for layer in (self.wk, self.wv))
        end = start + length
        self.cache_k[:batch, start:end] = k
        self.cache_v[:batch, start:end] = v
        repeats = self.heads // self.kv_heads
        keys = self.cache_k[:batch, :end].repeat_interleave(repeats, dim=2).transpose(1, 2)
        values = self.cache_v[:batch, :end].repeat_interleave(repeats, dim=2).transpose(1, 2)
        scores = torch.matmul(q.transpose(1, 2), keys.transpose(2, 3)) / (width // self.heads) ** 0.5
        if length > 1:
            mask = torch.full((length, end), float("-inf"), device=x.device)
            scores = scores + torch.triu(mask, diagonal=start + 1)
        mixed = torch.matmul(torch.softmax(scores.float(), -1).type_as(q), values)
        return self.wo(mixed.transpose(1, 2).contiguous().view(batch, length, -1))


class GatedMLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class PresetCacheLlama(nn.Module):
    """A decoder in the style of the first published Llama code, with a cache of its own."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(VOCABULARY, width), OwnRMSNorm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(nn.ModuleDict({
            "attention_norm": OwnRMSNorm(width), "attention": PresetCacheAttention(width, 4, 2),
            "mlp_norm": OwnRMSNorm(width), "mlp": GatedMLP(width, 48)}) for _ in range(layers))

    def forward(self, input_ids: torch.Tensor, start: int = 0) -> torch.Tensor:
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = x + layer["attention"](layer["attention_norm"](x), start)
            x = x + layer["mlp"](layer["mlp_norm"](x))
        return self.output(self.norm(x))


class HandWrittenCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 1))
        self.classifier = nn.Linear(16, 10)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.body(self.stem(pixel_values)).relu().mean((2, 3)))


class HandWrittenTagger(nn.Module):
    """A recurrent network over words, with a perceptron behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.lstm, self.gru = nn.LSTM(16, 24, batch_first=True), nn.GRU(24, 20, batch_first=True)
        self.perceptron = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.perceptron(self.gru(self.lstm(self.words(input_ids))[0])[0])


FAMILIES: tuple[Family, ...] = (
    Family("gpt2", gpt2, _text, attention=("GPT2Attention",), mlp=("GPT2MLP",), head=(".lm_head",), decodes=True,
           wholes={"llm": 1}),
    _decoder("llama", "Llama"),
    _decoder("mistral", "Mistral", sliding_window=4),
    _decoder("qwen2", "Qwen2"),
    _decoder("qwen3", "Qwen3", head_dim=16),
    _decoder("gemma", "Gemma", head_dim=16, num_key_value_heads=1),
    _decoder("gemma2", "Gemma2", head_dim=16, sliding_window=4),
    _decoder("phi", "Phi", num_key_value_heads=4),
    _decoder("phi3", "Phi3"),
    _decoder("gpt_neox", "GPTNeoX", num_key_value_heads=4),
    Family("gptj", _of("GPTJForCausalLM", "GPTJConfig", vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4,
                       n_positions=64, rotary_dim=8, bos_token_id=1, eos_token_id=2), _text,
           attention=("GPTJAttention",), mlp=("GPTJMLP",), head=(".lm_head",), decodes=True, wholes={"llm": 1}),
    Family("opt", _of("OPTForCausalLM", "OPTConfig", vocab_size=VOCABULARY, hidden_size=64, ffn_dim=112,
                      num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=64),
           _text, attention=("OPTAttention",), mlp=(".fc1",), head=(".lm_head",), decodes=True, wholes={"llm": 1}),
    Family("falcon", _of("FalconForCausalLM", "FalconConfig", vocab_size=VOCABULARY, hidden_size=64,
                         num_hidden_layers=2, num_attention_heads=4), _text, attention=("FalconAttention",),
           mlp=("FalconMLP",), head=(".lm_head",), decodes=True, wholes={"llm": 1}, is_grouped=True),
    Family("bloom", _of("BloomForCausalLM", "BloomConfig", vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4),
           _text, attention=("BloomAttention",), mlp=("BloomMLP",), head=(".lm_head",), decodes=True,
           wholes={"llm": 1}),
    _decoder("olmo2", "Olmo2"),
    _decoder("mixtral", "Mixtral", mlp=("none",), moe=("MixtralSparseMoeBlock",), num_local_experts=4,
             num_experts_per_tok=2),
    _decoder("qwen2_moe", "Qwen2Moe", moe=("Qwen2MoeSparseMoeBlock",), num_experts=4, num_experts_per_tok=2,
             moe_intermediate_size=48, shared_expert_intermediate_size=48),
    _decoder("deepseek_v3", "DeepseekV3", moe=("DeepseekV3MoE",), n_routed_experts=4, num_experts_per_tok=2,
             n_group=2, topk_group=1, moe_intermediate_size=48, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8,
             qk_nope_head_dim=8, v_head_dim=16, first_k_dense_replace=1, num_key_value_heads=4),
    Family("bert", _of("BertForMaskedLM", "BertConfig", **_ENCODER), _masked_text, attention=("BertAttention",),
           mlp=("BertIntermediate",), head=(".predictions.decoder",)),
    Family("roberta", _of("RobertaModel", "RobertaConfig", **_ENCODER), _masked_text, attention=("RobertaAttention",),
           mlp=("RobertaIntermediate",)),
    Family("distilbert", _of("DistilBertForMaskedLM", "DistilBertConfig", vocab_size=VOCABULARY, dim=64,
                             hidden_dim=112, n_layers=2, n_heads=4), _masked_text,
           attention=("DistilBertSelfAttention",), mlp=("FFN",), head=(".vocab_projector",)),
    Family("albert", _of("AlbertModel", "AlbertConfig", embedding_size=16, **_ENCODER), _masked_text,
           attention=("AlbertAttention",), mlp=(".ffn",)),
    Family("t5", _t5, _two_texts, attention=("T5Attention",), mlp=("T5DenseActDense",), head=(".lm_head",),
           decodes=True, has_static_cache=False, wholes={"llm": 1}),
    Family("t5_gated", lambda: _t5(feed_forward_proj="gated-gelu"), _two_texts, attention=("T5Attention",),
           mlp=("T5DenseGatedActDense",), head=(".lm_head",), decodes=True,
           has_static_cache=False, wholes={"llm": 1}),
    Family("bart", _bart, _two_texts, attention=("BartAttention",), mlp=(".fc1",), head=(".lm_head",), decodes=True,
           has_static_cache=False, wholes={"llm": 1}),
    Family("vit", _of("ViTForImageClassification", "ViTConfig", **_VISION), _pixels, attention=("ViTAttention",),
           mlp=("ViTMLP",), head=(".classifier",), wholes={"vision_encoder": 1}),
    Family("dinov2", _of("Dinov2Model", "Dinov2Config", **{**_VISION, "mlp_ratio": 2}), _pixels,
           attention=("Dinov2Attention",), mlp=("Dinov2MLP",), wholes={"vision_encoder": 1}),
    Family("swin", _of("SwinModel", "SwinConfig", image_size=32, patch_size=4, embed_dim=16, depths=[2, 2],
                       num_heads=[2, 4], window_size=4), _pixels, attention=("SwinAttention",), mlp=("SwinMLP",),
           wholes={"vision_encoder": 1}, heads=(2, 4)),
    Family("resnet", _of("ResNetForImageClassification", "ResNetConfig", embedding_size=16, hidden_sizes=[16, 32],
                         depths=[2, 2], num_channels=3), _pixels, head=(".classifier.1",),
           wholes={"vision_encoder": 1}),
    Family("convnext", _of("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[16, 32], depths=[2, 2],
                           num_stages=2), _pixels, mlp=(".pwconv1",), head=(".classifier",),
           wholes={"vision_encoder": 1}),
    Family("mobilenet_v2", _of("MobileNetV2Model", "MobileNetV2Config", image_size=32, depth_multiplier=0.25), _pixels,
           wholes={"vision_encoder": 1}),
    Family("detr", _detr, _pixels, attention=("DetrSelfAttention", "DetrCrossAttention"), mlp=("DetrMLP",),
           wholes={"vision_encoder": 1}),
    Family("clip", _clip, lambda: _text() | _pixels(), attention=("CLIPAttention",), mlp=("CLIPMLP",),
           wholes={"vision_encoder": 1}),
    Family("llava", _llava, _image_and_text, attention=("CLIPAttention", "LlamaAttention"),
           mlp=("CLIPMLP", "LlamaMLP", "LlavaMultiModalProjector"), head=(".lm_head",), decodes=True,
           wholes={"vision_encoder": 1, "llm": 1}, is_grouped=True),
    Family("whisper", _whisper, lambda: {
        "input_features": torch.linspace(-1, 1, 16 * 40).reshape(1, 16, 40), "decoder_input_ids": _ids(4)},
        attention=("WhisperAttention",), mlp=(".fc1",), head=(".proj_out",), decodes=True,
           has_static_cache=False, wholes={"llm": 1}),
    Family("wav2vec2", _wav2vec2, lambda: {"input_values": torch.linspace(-1, 1, 400).reshape(1, 400)},
           attention=("Wav2Vec2Attention",), mlp=("Wav2Vec2FeedForward",)),
    Family("hand_written_gpt", HandWrittenGPT, _text, attention=("HandWrittenAttention",), mlp=("HandWrittenMLP",),
           head=(".lm_head",), wholes={"llm": 1}, is_hand_written=True),
    Family("hand_written_llama", PresetCacheLlama, _text, attention=("PresetCacheAttention",), mlp=("GatedMLP",),
           head=(".output",), wholes={"llm": 1}, is_grouped=True, is_hand_written=True),
    Family("hand_written_cnn", HandWrittenCNN, _pixels, head=(".classifier",), wholes={"vision_encoder": 1},
           is_hand_written=True),
    Family("hand_written_tagger", HandWrittenTagger, _text, mlp=(".perceptron",), recurrent=("LSTM", "GRU"),
           head=(".perceptron.2",), is_hand_written=True),
)


_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)
_NORM_NAMES = ("RMSNorm", "LayerNorm", "BatchNorm", "BatchNorm2d", "T5LayerNorm")
_SLICED = ("WhisperPositionalEmbedding", "T5RelativePositionBias")
"""Tables by their base class that look nothing up, but take a slice."""
_CONVOLUTIONS = (nn.modules.conv._ConvNd,)


def _is_norm(module: nn.Module) -> bool:
    own = next(iter(module.parameters(recurse=False)), None) is not None or any(module.named_buffers(recurse=False))
    return isinstance(module, _NORMS) or (type(module).__name__.endswith(_NORM_NAMES) and own)


def _kinds(family: Family, path: str, module: nn.Module) -> Iterator[str]:
    """Say which structures a call of a module is."""
    names = (type(module).__name__, "." + path)
    for kind in ("attention", "mlp", "moe", "recurrent", "head"):
        if any(label == names[0] or (label[0] == "." and names[1].endswith(label)) for label in getattr(family, kind)):
            yield kind
    if _is_norm(module):
        yield "norm"
    if isinstance(module, _CONVOLUTIONS):
        yield "conv_block"
    if isinstance(module, nn.Embedding) and type(module).__name__ not in _SLICED:
        yield "lookup"


@contextlib.contextmanager
def watched(family: Family, model: nn.Module, position: Callable[[], int]) -> Iterator[Mapping[str, list[Call]]]:
    """Note the calls of labelled modules.

    Args:
        family: Says which modules are labelled.
        model: Its model.
        position: Says how many nodes have been recorded so far.
    """
    calls: dict[str, list[Call]] = {}
    handles: list[Any] = []
    for path, module in model.named_modules():
        kinds = tuple(_kinds(family, path, module))
        if kinds:
            starts: list[int] = []

            def before(module: nn.Module, args: Any, starts: list[int] = starts) -> None:
                starts.append(position())

            def after(module: nn.Module, args: Any, result: Any, kinds: Sequence[str] = kinds, path: str = path,
                      starts: list[int] = starts) -> None:
                call = Call(path, type(module).__name__, starts.pop(), position())
                for kind in kinds:
                    calls.setdefault(kind, []).append(call)

            handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@attrs.frozen
class Run:
    """One recorded call of a model: the graph, the calls of labelled modules, and what came out."""

    model: nn.Module
    graph: RecordedGraph
    calls: Mapping[str, list[Call]]
    output: Any


def captured_run(
    family: Family, model: nn.Module, mode: str, *, inputs: Mapping[str, Any] | None = None, **options: Any
) -> Run:
    """Record a call of a model.

    Args:
        family: Says what is labelled.
        model: Its model, here or there already.
        mode: ``no_grad``, ``inference``, ``grad``, or ``training``: with dropout, and with the backward pass.
        inputs: Others than the family's own.
        options: Further arguments of the model.
    """
    model.to(DEVICE).train(mode == "training")
    given = tree_map(lambda value: value.to(DEVICE), dict(inputs or family.inputs()))
    context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, torch.enable_grad)
    with context(), djinn.capture(model) as captured:
        with watched(family, model, lambda: len(captured._watch)) as calls:
            output = model(**given, **options)
        if mode == "training":
            first = next(item for item in tree_leaves(output) if isinstance(item, torch.Tensor))
            first.float().square().mean().backward()
    return Run(model, captured.graph, calls, output)


@cache
def recorded(family: Family, mode: str) -> Run:
    """Record one call of a family's model; ``cached`` is without gradients, with a cache that begins."""
    options = {} if family.is_hand_written or not family.decodes else {"use_cache": mode == "cached"}
    return captured_run(family, family.model(), "no_grad" if mode == "cached" else mode, **options)
