"""Models of several families give on a guarded server what they give here."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import djinn

DEVICE = "remote_accelerator:0"
pytestmark = pytest.mark.usefixtures("on_a_server")


def _equal(remote: torch.Tensor, local: torch.Tensor) -> None:
    assert torch.equal(remote.cpu(), local)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gpt2_generates_the_same_tokens(mode: Callable[[], object]) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    remote = copy.deepcopy(model).to(DEVICE)
    prompt = torch.tensor([[464, 3290, 318, 257]])
    options = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
    with mode():
        expected = model.generate(prompt, **options)
        djinn.reset_stats()
        tokens = remote.generate(prompt.to(DEVICE), **options)
        trips = djinn.stats()["round_trips"]
    assert torch.equal(tokens.cpu(), expected)
    assert trips <= 1.2 * 32 + 4


def _tiny(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    transformers = pytest.importorskip("transformers")
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    if name == "llama":
        config = transformers.LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                          num_attention_heads=4, num_key_value_heads=2)
        return transformers.LlamaForCausalLM(config), {"input_ids": ids}
    if name == "bert":
        config = transformers.BertConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                         num_attention_heads=4)
        return transformers.BertModel(config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name == "vit":
        config = transformers.ViTConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                        num_attention_heads=4, image_size=32, patch_size=8)
        return transformers.ViTModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], num_channels=3)
    return transformers.ResNetModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", ["llama", "bert", "vit", "resnet"])
def test_forward_equals_eager(name: str, grad: bool) -> None:
    torch.manual_seed(1)
    model, inputs = _tiny(name)
    model.eval()
    remote = copy.deepcopy(model).to(DEVICE)
    with torch.set_grad_enabled(grad):
        expected = model(**inputs)[0]
        result = remote(**{key: value.to(DEVICE) for key, value in inputs.items()})[0]
    assert result.device == torch.device(DEVICE)
    assert result.requires_grad == expected.requires_grad
    _equal(result.detach(), expected.detach())


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, num_layers=2, batch_first=True, dropout=0.25)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def _cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(8 * 4, 4))


def _train(model: nn.Module, optimizer: str, device: str, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    torch.manual_seed(3)
    model.to(device).train()
    step = {"adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
            "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9)}[optimizer](model.parameters())
    losses = []
    for _ in range(5):
        step.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("kind", ["lstm", "cnn"])
def test_five_training_steps_equal_eager(kind: str, optimizer: str) -> None:
    torch.manual_seed(2)
    model = _Lstm() if kind == "lstm" else _cnn()
    x = torch.randn(6, 5, 8) if kind == "lstm" else torch.randn(6, 3, 8, 8)
    y = torch.randint(0, 4, (6,))
    remote = copy.deepcopy(model)
    expected = _train(model, optimizer, "cpu", x, y)
    losses = _train(remote, optimizer, DEVICE, x, y)
    assert losses == expected
    for name, theirs in model.state_dict().items():
        assert torch.equal(remote.state_dict()[name].cpu(), theirs), name
