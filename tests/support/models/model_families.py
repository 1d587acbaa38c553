"""Families of transformers' models as small random ones, and what users do with them: generation, training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

__all__ = ("FAMILIES", "Family", "outcome_of")

_VOCABULARY = 96
_SEED = 11
_STEPS = 2
_TEXT = {"vocab_size": _VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_EXPERTS = {**_GROUPED, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
_GPT = {"vocab_size": _VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
           "image_size": 16, "patch_size": 8}


def _ids(rows: int = 2, columns: int = 7) -> torch.Tensor:
    return torch.arange(3, 3 + rows * columns).reshape(rows, columns) % (_VOCABULARY - 3) + 3


def _padded() -> dict[str, torch.Tensor]:
    ids, mask = _ids(), torch.ones(2, 7, dtype=torch.long)
    ids[0, :3], mask[0, :3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def _causal() -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(), "labels": _ids()}


def _labelled() -> dict[str, torch.Tensor]:
    ids, mask = _ids(), torch.ones(2, 7, dtype=torch.long)
    ids[0, -3:], mask[0, -3:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1])}


def _masked() -> dict[str, torch.Tensor]:
    return {**_labelled(), "labels": _ids()}


def _image(size: int = 16) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([0, 1])}


def _sound() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, 800), "labels": torch.tensor([0, 1])}


@attrs.frozen
class Family:
    """One architecture, small and random.

    Attributes:
        name: Its ``model_type`` in transformers.
        head: The name of transformers' class that makes it, after ``AutoModel``.
        config: What its configuration is given.
        inputs: Makes what it is called with.
        generates: Whether `generate` is a part of it.
        drawn: Names of configuration options that let it drop nothing while it trains.
    """

    name: str
    head: str
    config: Mapping[str, Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    generates: bool = False

    def model(self) -> Any:
        """Make it."""
        import transformers

        torch.manual_seed(_SEED)
        config = transformers.AutoConfig.for_model(self.name, **self.config)
        return getattr(transformers, f"AutoModel{self.head}").from_config(config).eval()

    def __str__(self) -> str:
        return self.name


def _language(name: str, config: Mapping[str, Any] = _GROUPED, **others: Any) -> Family:
    return Family(name, "ForCausalLM", {**config, **others}, _causal, generates=True)


def _encoder(name: str, config: Mapping[str, Any] = _TEXT, **others: Any) -> Family:
    return Family(name, "ForSequenceClassification", {**config, **others}, _labelled)


def _sequences(name: str, **config: Any) -> Family:
    return Family(name, "ForSeq2SeqLM", {
        "vocab_size": _VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 2, "forced_eos_token_id": None, **config}, _masked, generates=True)


def _vision(name: str, **config: Any) -> Family:
    return Family(name, "ForImageClassification", {**_VISION, **config}, _image)


FAMILIES = (
    _language("gpt2", _GPT),
    _language("gpt_neo", _TEXT, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4),
    _language("gpt_neox", _TEXT),
    _language("gptj", _GPT, rotary_dim=4),
    _language("gpt_bigcode", _GPT),
    _language("codegen", _GPT, rotary_dim=4),
    _language("opt", _TEXT, ffn_dim=48, word_embed_proj_dim=32),
    _language("bloom", {"vocab_size": _VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "pad_token_id": 0}),
    _language("mpt", {"vocab_size": _VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64,
                      "pad_token_id": 0, "eos_token_id": 2}),
    _language("falcon", _TEXT, multi_query=True),
    _language("llama"),
    _language("mistral", sliding_window=4),
    _language("mixtral", _EXPERTS, sliding_window=4),
    _language("qwen2"),
    _language("qwen3", head_dim=8),
    _language("qwen2_moe", _EXPERTS),
    _language("qwen3_moe", _EXPERTS, head_dim=8),
    _language("gemma", head_dim=8),
    _language("gemma2", head_dim=8, sliding_window=4),
    _language("gemma3_text", head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    _language("phi"),
    _language("phi3"),
    _language("cohere"),
    _language("cohere2", sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    _language("olmo"),
    _language("olmo2"),
    _language("olmoe", _EXPERTS),
    _language("stablelm"),
    _language("starcoder2"),
    _language("granite"),
    _language("granitemoe", _EXPERTS),
    _language("glm", head_dim=8),
    _language("glm4", head_dim=8),
    _language("nemotron"),
    _language("persimmon", _TEXT),
    _language("smollm3"),
    _language("gpt_oss", _EXPERTS, head_dim=8, sliding_window=4,
              layer_types=["sliding_attention", "full_attention"]),
    _language("deepseek_v3", _EXPERTS, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
              v_head_dim=8, n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
              num_key_value_heads=4),
    _language("mamba", {"vocab_size": _VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4,
                        "pad_token_id": 0, "eos_token_id": 2}),
    _encoder("bert"),
    _encoder("roberta"),
    _encoder("distilbert", {"vocab_size": _VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4,
                            "max_position_embeddings": 64, "pad_token_id": 0}),
    _encoder("albert", embedding_size=16),
    _encoder("electra", embedding_size=16),
    _encoder("deberta-v2", relative_attention=True, pos_att_type=["p2c", "c2p"], type_vocab_size=0),
    _encoder("mpnet"),
    _encoder("modernbert", local_attention=4),
    _sequences("bart"),
    _sequences("pegasus"),
    _sequences("marian", decoder_start_token_id=0),
    Family("t5", "ForSeq2SeqLM", {"vocab_size": _VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
                                  "num_heads": 4, "decoder_start_token_id": 0}, _masked, generates=True),
    Family("whisper", "ForSpeechSeq2Seq", {
        **_sequences("whisper").config, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32,
        "suppress_tokens": None, "begin_suppress_tokens": None},
        lambda: {"input_features": torch.randn(2, 8, 32), "labels": _ids()}),
    _vision("vit"),
    _vision("beit"),
    _vision("dinov2"),
    Family("swin", "ForImageClassification", {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2,
                                              "patch_size": 4, "image_size": 16}, _image),
    Family("resnet", "ForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
           lambda: _image(32)),
    Family("convnext", "ForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2,
                                                  "patch_size": 4}, lambda: _image(32)),
    Family("wav2vec2", "ForAudioClassification", {
        **_TEXT, "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 4], "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16, "mask_time_prob": 0.0, "layerdrop": 0.0},
        _sound),
    Family("clip", "", {"text_config": _TEXT, "vision_config": _VISION, "projection_dim": 16},
           lambda: {**{name: value for name, value in _masked().items() if name != "labels"},
                    "pixel_values": torch.randn(2, 3, 16, 16), "return_loss": True}),
)


def _moved(inputs: Mapping[str, Any], device: str) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def outcome_of(family: Family, model: Any, device: str) -> dict[str, torch.Tensor]:
    """Run a copy of a model on a device: forward, `generate`, and some steps of training with dropout."""
    moved = copy.deepcopy(model).to(device)
    torch.manual_seed(_SEED)
    inputs = _moved(family.inputs(), device)
    found: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, value in moved(**inputs).items():
            if isinstance(value, torch.Tensor):
                found[f"forward {name}"] = value
        if family.head == "ForCausalLM":
            # Without a mask some kernels take another way.
            padded = _moved(_padded(), device)
            found["forward padded"] = moved(**padded).logits
            found["padded tokens"] = moved.generate(**padded, max_new_tokens=6, do_sample=False)
        if family.generates:
            prompt = {name: value for name, value in inputs.items() if name != "labels"}
            found["tokens"] = moved.generate(**prompt, max_new_tokens=6, do_sample=False)
    moved.train()
    optimizer = torch.optim.AdamW(moved.parameters(), lr=1e-3)
    torch.manual_seed(_SEED)
    for step in range(_STEPS):
        optimizer.zero_grad()
        loss = moved(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(moved.parameters(), 1.0)
        optimizer.step()
        found[f"loss of step {step}"] = loss.detach()
    found |= {f"parameter {name}": value.detach() for name, value in moved.state_dict().items()}
    return found
