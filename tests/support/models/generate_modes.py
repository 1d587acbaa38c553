"""Ways to call transformers' ``generate``, each with a Llama whose queries share keys."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ("MODES", "generated", "grouped_query_llama")

_NEW = 8
_VOCABULARY = 96
_SEED = 5


def grouped_query_llama(layers: int = 2) -> Any:
    """A small random Llama with four heads for queries and two for keys and values."""
    import transformers

    torch.manual_seed(_SEED)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=95,
        initializer_range=0.3)).eval()


def _tokenizer() -> Any:
    import tokenizers
    import transformers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{chr(45 + number): number for number in range(3, _VOCABULARY)}}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, [], unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


def _prompt(device: str, rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.tensor([[7, 8, 9, 7, 8, 9], [11, 5, 23, 42, 17, 30]])[:rows]
    return {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}


def _padded(device: str) -> dict[str, torch.Tensor]:
    ids, mask = torch.tensor([[0, 0, 0, 7, 8, 9], [11, 5, 23, 42, 17, 30]]), torch.ones(2, 6, dtype=torch.long)
    mask[0, :3] = 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _plainly(**options: Any) -> Callable[[Any, str], Any]:
    def run(model: Any, device: str) -> Any:
        return model.generate(**_prompt(device), max_new_tokens=_NEW, **{"do_sample": False, **options})

    return run


def _sampled(**options: Any) -> Callable[[Any, str], Any]:
    return _plainly(do_sample=True, **options)


def _left_padded(model: Any, device: str) -> Any:
    return model.generate(**_padded(device), max_new_tokens=_NEW, do_sample=False)


def _from_embeddings(model: Any, device: str) -> Any:
    given = _prompt(device)
    embedded = model.get_input_embeddings()(given["input_ids"])
    return model.generate(inputs_embeds=embedded, attention_mask=given["attention_mask"], max_new_tokens=_NEW,
                          do_sample=False)


def _assisted(model: Any, device: str) -> Any:
    assistant = grouped_query_llama(layers=1).to(device)
    return model.generate(**_prompt(device, 1), assistant_model=assistant, max_new_tokens=_NEW, do_sample=False)


def _from_lookup(model: Any, device: str) -> Any:
    return model.generate(**_prompt(device, 1), prompt_lookup_num_tokens=3, max_new_tokens=_NEW, do_sample=False)


def _with_stop_string(model: Any, device: str) -> Any:
    words = model.generate(**_prompt(device, 1), max_new_tokens=_NEW, do_sample=False)[0, -3:].tolist()
    return model.generate(**_prompt(device, 1), max_new_tokens=_NEW, do_sample=False, tokenizer=_tokenizer(),
                          stop_strings=[chr(45 + words[0])])


def _streamed(model: Any, device: str) -> Any:
    from transformers.generation.streamers import BaseStreamer

    seen: list[torch.Tensor] = []

    class Streamer(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            seen.append(value.cpu().reshape(-1).clone())

        def end(self) -> None:
            seen.append(torch.tensor([-1]))

    tokens = model.generate(**_prompt(device, 1), streamer=Streamer(), max_new_tokens=_NEW, do_sample=False)
    return tokens, torch.cat(seen)


def _continued(model: Any, device: str) -> Any:
    """A second turn of a conversation, with the cache of the first."""
    from transformers import DynamicCache

    given, cache = _prompt(device, 1), DynamicCache(config=model.config)
    first = model.generate(**given, past_key_values=cache, max_new_tokens=4, do_sample=False)
    longer = torch.cat([first, given["input_ids"]], dim=1)
    return first, model.generate(longer, attention_mask=torch.ones_like(longer), past_key_values=cache,
                                 max_new_tokens=_NEW, do_sample=False)


def _with_own_criteria(model: Any, device: str) -> Any:
    from transformers import LogitsProcessorList, StoppingCriteriaList

    def only_even(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(torch.arange(scores.shape[-1], device=scores.device) % 2 == 1, float("-inf"))

    def is_long(ids: torch.Tensor, scores: torch.Tensor, **others: Any) -> torch.Tensor:
        return torch.full((ids.shape[0],), ids.shape[1] >= 11, device=ids.device, dtype=torch.bool)

    return model.generate(**_prompt(device), max_new_tokens=_NEW, do_sample=False,
                          logits_processor=LogitsProcessorList([only_even]),
                          stopping_criteria=StoppingCriteriaList([is_long]))


def _with_everything_returned(model: Any, device: str) -> Any:
    model.set_attn_implementation("eager")
    found = model.generate(**_prompt(device), max_new_tokens=_NEW, do_sample=False, return_dict_in_generate=True,
                           output_scores=True, output_logits=True, output_attentions=True, output_hidden_states=True)
    return [found.sequences, found.scores, found.logits, found.attentions, found.hidden_states]


def _allowed(batch: int, ids: torch.Tensor) -> list[int]:
    return list(range(3, 30 + batch))


MODES: Mapping[str, Callable[[Any, str], Any]] = {
    "greedy": _plainly(),
    "left padded batch": _left_padded,
    "without a cache": _plainly(use_cache=False),
    "static cache": _plainly(cache_implementation="static"),
    "prefill in chunks": _plainly(prefill_chunk_size=2),
    "sampling": _sampled(top_k=0),
    "top k, top p, temperature": _sampled(top_k=20, top_p=0.9, temperature=0.7),
    "min p, typical p, cutoffs": _sampled(min_p=0.02, typical_p=0.9, epsilon_cutoff=1e-3, eta_cutoff=1e-3),
    "several sequences": _sampled(num_return_sequences=3),
    "beam search": _plainly(num_beams=3, num_return_sequences=2, length_penalty=0.8),
    "beam search, early stopping": _plainly(num_beams=3, early_stopping=True),
    "beam sampling": _sampled(num_beams=3),
    "assisted": _assisted,
    "prompt lookup": _from_lookup,
    "penalties": _plainly(repetition_penalty=1.3, no_repeat_ngram_size=2, encoder_repetition_penalty=1.1),
    "forbidden and forced tokens": _plainly(bad_words_ids=[[7], [8, 9]], suppress_tokens=[5], min_new_tokens=6,
                                            forced_eos_token_id=2, sequence_bias=[[[11], 2.0]]),
    "allowed prefixes": _plainly(prefix_allowed_tokens_fn=_allowed),
    "guidance": _plainly(guidance_scale=1.5),
    "exponential decay, renormalized": _plainly(exponential_decay_length_penalty=(3, 1.2), renormalize_logits=True),
    "stop string": _with_stop_string,
    "own processors and criteria": _with_own_criteria,
    "streamed": _streamed,
    "from embeddings": _from_embeddings,
    "second turn": _continued,
    "everything returned": _with_everything_returned,
}


def _flat(item: Any) -> list[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        return [item]
    return [tensor for member in item for tensor in _flat(member)]


def generated(mode: str, model: Any, device: str, *, compiles: bool = False) -> list[torch.Tensor]:
    """All tensors that a mode gives with a copy of a model on a device, compiled by djinn's backend if wanted."""
    moved = copy.deepcopy(model).to(device)
    if compiles:
        moved.forward = torch.compile(moved.forward, backend="djinn")
    torch.manual_seed(_SEED)
    return _flat(MODES[mode](moved, device))
