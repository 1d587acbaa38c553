"""Models of a server's store: loaded by name in another process than the server's, damaged, changed and shared."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.warm import run_python
from support.servers.fleet import fleet_of

import djinn  # before safetensors, whose function it replaces
from djinn.errors import ConfigurationError
from djinn_plugins.models import file_digests
from djinn_plugins.models.models import made, tensors_of
from djinn_plugins.server.models import MIN_MAPPED_BYTES
from djinn_plugins.server.tokens.tokens import TokenFile

from safetensors.torch import load_file, save_file  # isort: skip

WEIGHTS = {
    "mapped": torch.randn(300, 400, generator=torch.Generator().manual_seed(1)), "small": torch.arange(10),
    "half": torch.randn(7, generator=torch.Generator().manual_seed(2)).half(), "none": torch.empty(0, 3),
    "scalar": torch.tensor(2.5, dtype=torch.float64), "flags": torch.tensor([True, False]),
}
LARGE_BYTES = 500 * 10**6
DEVICE = "remote_accelerator:0"
GROWTH_BYTES = 20 * 10**6
CLIENT = """
import resource, sys, torch, djinn
djinn.init(server=sys.argv[1])
(torch.ones(2, device="remote_accelerator:0") + 1).sum().item()
djinn.models.list()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
weights = djinn.models.load("large")
total = sum(float(weight.sum()) for weight in weights.values())
print(total, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before, djinn.stats()["bytes_sent"],
      djinn.stats()["bytes_received"])
"""


def write_models(folder: Path) -> None:
    (folder / "whole").mkdir()
    save_file(WEIGHTS, folder / "whole" / "model.safetensors")
    save_file({"x": torch.ones(5)}, folder / "plain.safetensors")
    sharded = folder / "owner" / "sharded@v1"
    sharded.mkdir(parents=True)
    names = {"mapped": "model-1.safetensors", "small": "model-2.safetensors"}
    for name, file in names.items():
        save_file({name: WEIGHTS[name]}, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    write_models(folder)
    return folder


@pytest.fixture
def served(store: Path, start_server: Any) -> Iterator[Any]:
    running = start_server("--models", str(store), "--sandbox", "auto")
    djinn.init(server=running.address)
    yield running
    djinn.shutdown()


def test_models_are_loaded_by_name_and_equal_the_files(served: Any) -> None:
    assert [(model.name, model.revision, len(model.files)) for model in djinn.models.list()] == [
        ("owner/sharded", "v1", 2), ("plain", "", 1), ("whole", "", 1)]
    assert WEIGHTS["mapped"].nbytes >= MIN_MAPPED_BYTES > WEIGHTS["small"].nbytes
    for loaded in (djinn.models.load("whole"), djinn.models.load("owner/sharded")):
        for name, weight in loaded.items():
            assert weight.dtype is WEIGHTS[name].dtype
            assert torch.equal(weight.cpu(), WEIGHTS[name])
    assert set(djinn.models.load("whole")) == set(WEIGHTS)
    lower = djinn.models.load("whole", dtype=torch.bfloat16)
    assert torch.equal(lower["mapped"].cpu(), WEIGHTS["mapped"].bfloat16())
    assert lower["small"].dtype is torch.int64
    digest = djinn.models.list()[0].digest
    assert djinn.models.load("owner/sharded", revision=digest).keys() == {"mapped", "small"}
    assert djinn.stats()["bytes_sent"] < 100_000


def test_what_a_session_writes_is_its_own(served: Any) -> None:
    djinn.reset_stats()
    first, second = djinn.models.load("whole"), djinn.models.load("whole")
    assert djinn.stats()["round_trips"] == 4, "for the size of the description and for its content"
    first["mapped"].mul_(2)
    view = second["mapped"].t()
    assert torch.equal(first["mapped"].cpu(), WEIGHTS["mapped"] * 2)
    assert torch.equal(view.cpu(), WEIGHTS["mapped"].t())
    djinn.init(server=served.address)
    assert torch.equal(djinn.models.load("whole")["mapped"].cpu(), WEIGHTS["mapped"])


def test_damaged_changed_and_renamed_files_are_refused_by_name_and_harm_no_other(served: Any, store: Path) -> None:
    path = store / "plain.safetensors"
    data = path.read_bytes()
    sums = store / "whole" / "SHA256SUMS"

    def problem(name: str) -> str:
        assert djinn.models.load("owner/sharded")["small"].sum().item() == 45
        with pytest.raises(ConfigurationError) as caught:
            djinn.models.load(name)
        return str(caught.value)

    path.write_bytes(data[:-1])
    assert "plain.safetensors: it should have" in problem("plain")
    path.write_bytes(data.replace(b'"x"', b"[1]"))
    assert "plain.safetensors: its header is malformed" in problem("plain")
    path.write_bytes(data)
    assert djinn.models.load("plain")["x"].sum().item() == 5

    whole = next(model for model in djinn.models.list() if model.name == "whole")
    sums.write_text(f"{whole.digest}  model.safetensors\n")
    weights = djinn.models.load("whole")
    assert weights["small"].sum().item() == 45
    file = store / "whole" / "model.safetensors"
    original = file.read_bytes()
    changed = store / "changed"
    changed.write_bytes(original[:-1] + bytes((original[-1] ^ 1,)))
    changed.replace(file)
    assert "model.safetensors has another content" in problem("whole")
    assert torch.equal(weights["mapped"].cpu(), WEIGHTS["mapped"]), "what was loaded stays"
    file.rename(store / "whole" / "other.safetensors")
    assert "other.safetensors is not in SHA256SUMS" in problem("whole")
    assert "No model missing" in problem("missing")
    (store / "outside.safetensors").symlink_to("/etc/hostname")
    assert "leaves the folder" in problem("outside")


def test_a_worker_notices_that_an_open_file_has_another_content_although_its_size_and_time_stay(
    served: Any, store: Path
) -> None:
    file = store / "whole" / "model.safetensors"
    like, tensors = torch.empty(0, device=DEVICE), {tensor.name: tensor for tensor in tensors_of("whole").tensors}
    shutil.copy(file, store / "copy")
    (store / "copy").replace(file)
    assert torch.equal(made(like, tensors["mapped"]).cpu(), WEIGHTS["mapped"]), "the open file has its content still"
    like, tensors = torch.empty(0, device=DEVICE), {tensor.name: tensor for tensor in tensors_of("plain").tensors}
    file, status = store / "plain.safetensors", (store / "plain.safetensors").stat()
    file.write_bytes(file.read_bytes()[:-4] + b"abcd")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(RuntimeError, match="was changed"):
        made(like, tensors["x"]).cpu()
    assert djinn.models.load("plain")["x"].cpu()[:4].tolist() == [1.0] * 4


def test_a_file_that_the_server_has_is_not_sent(served: Any, tmp_path: Path) -> None:
    mine = tmp_path / "mine.safetensors"
    save_file(WEIGHTS, mine)
    before = djinn.stats()["bytes_sent"]
    loaded = djinn.models.load_file(mine, dtype=torch.float64)
    assert torch.equal(loaded["mapped"].cpu(), WEIGHTS["mapped"].double())
    for name, weight in load_file(mine, device="remote_accelerator:0").items():
        assert torch.equal(weight.cpu(), WEIGHTS[name])
    assert torch.equal(load_file(mine)["mapped"], WEIGHTS["mapped"])
    assert loaded.keys() == WEIGHTS.keys()
    assert djinn.stats()["bytes_sent"] - before < 20_000
    other = {name: weight + 1 if name == "mapped" else weight for name, weight in WEIGHTS.items()}
    save_file(other, mine)
    for name, weight in djinn.models.load_file(mine).items():
        assert torch.equal(weight.cpu(), other[name])
    assert djinn.stats()["bytes_sent"] - before >= WEIGHTS["mapped"].nbytes


def test_a_file_is_loaded_as_it_is_now_although_its_digest_is_remembered(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(file_digests, "SETTLED_NS", 0)
    mine, changed = tmp_path / "mine.safetensors", {**WEIGHTS, "mapped": WEIGHTS["mapped"] + 1}
    save_file(WEIGHTS, mine)
    before, sent = mine.stat(), djinn.stats()["bytes_sent"]
    for _ in range(2):
        assert torch.equal(djinn.models.load_file(mine)["mapped"].cpu(), WEIGHTS["mapped"])
    assert djinn.stats()["bytes_sent"] - sent < WEIGHTS["mapped"].nbytes
    assert str(mine) in (tmp_path / "caches" / "djinn" / "digests.json").read_text()
    save_file(changed, tmp_path / "changed.safetensors")
    mine.write_bytes((tmp_path / "changed.safetensors").read_bytes())
    os.utime(mine, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert mine.stat().st_size == before.st_size
    assert torch.equal(djinn.models.load_file(mine)["mapped"].cpu(), changed["mapped"])


def test_what_torch_load_reads_is_not_sent_if_the_server_has_the_file(served: Any, store: Path, tmp_path: Path) -> None:
    shared = WEIGHTS["mapped"]
    saved = {**WEIGHTS, "view": shared[1:, ::2], "odd": torch.nn.Parameter(shared.t())}
    mine = tmp_path / "mine.pt"
    torch.save(saved, mine)
    shutil.copy(mine, store / "theirs.pt")
    assert "theirs.pt" in {model.name for model in djinn.models.list() if not model.problem}
    before = djinn.stats()["bytes_sent"]
    loaded = torch.load(mine, map_location="remote_accelerator:0")
    for name, weight in saved.items():
        assert type(loaded[name].data) is type(loaded["mapped"])
        assert loaded[name].stride() == weight.stride()
        assert torch.equal(loaded[name].cpu(), weight)
    loaded["mapped"].zero_()
    assert loaded["view"].abs().sum().item() == 0, "they share a storage"
    assert torch.equal(torch.load(mine)["mapped"], shared)
    assert djinn.stats()["bytes_sent"] - before < 40_000
    torch.save({"mapped": shared + 1}, mine)
    assert torch.equal(torch.load(mine, map_location="remote_accelerator:0")["mapped"].cpu(), shared + 1)
    assert djinn.stats()["bytes_sent"] - before >= shared.nbytes


def test_a_module_takes_the_tensors_and_ties_them(store: Path, start_server: Any) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    local = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=100, bos_token_id=1, eos_token_id=2))
    local.eval().save_pretrained(store / "gpt", max_shard_size="200KB")
    djinn.init(server=start_server("--models", str(store)).address)
    assert len(next(model for model in djinn.models.list() if model.name == "gpt").files) > 1
    with torch.device("meta"):
        remote = GPT2LMHeadModel(local.config).eval()
    missing = remote.load_state_dict(djinn.models.load("gpt"), strict=False, assign=True).missing_keys
    assert missing == ["lm_head.weight"]
    remote.tie_weights()
    assert remote.lm_head.weight is remote.transformer.wte.weight
    prompt = torch.arange(3, 9)[None]
    expected = local.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(remote.generate(prompt.to("remote_accelerator:0"), max_new_tokens=6, do_sample=False).cpu(),
                       expected)
    assert djinn.stats()["bytes_sent"] < local.num_parameters() * 4 / 2
    djinn.shutdown()


def test_a_pretrained_model_of_files_that_the_server_has_is_not_sent(store: Path, start_server: Any,
                                                                    tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(4)
    local = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=100, bos_token_id=1, eos_token_id=2))
    local.eval()
    for folder in (store / "gpt", tmp_path / "mine"):
        local.save_pretrained(folder, max_shard_size="200KB")
    djinn.init(server=start_server("--models", str(store)).address)
    prompt = torch.arange(3, 9)[None]
    expected = local.generate(prompt, max_new_tokens=6, do_sample=False)
    configured = {"config": local.config, "state_dict": djinn.models.load("gpt")}
    for folder in ("gpt", "other"):
        shutil.copytree(tmp_path / "mine", tmp_path / folder, ignore=shutil.ignore_patterns("model*"))
    for place, options in ((tmp_path / "mine", {}), (None, configured), (tmp_path / "gpt", {})):
        before = djinn.stats()["bytes_sent"]
        remote = GPT2LMHeadModel.from_pretrained(place, device_map="remote_accelerator:0", **options).eval()
        assert remote.lm_head.weight is remote.transformer.wte.weight
        found = remote.generate(prompt.to("remote_accelerator:0"), max_new_tokens=6, do_sample=False)
        assert torch.equal(found.cpu(), expected)
        assert djinn.stats()["bytes_sent"] - before < local.num_parameters() * 4 / 4
    for folder, device in (("gpt", "cpu"), ("other", DEVICE)):
        with pytest.raises(OSError, match="no file named model.safetensors"):
            GPT2LMHeadModel.from_pretrained(tmp_path / folder, device_map=device)
    before = djinn.stats()["bytes_sent"]
    lower, expected = (GPT2LMHeadModel.from_pretrained(tmp_path / "mine", dtype=torch.bfloat16, device_map=place).eval()
                       for place in ("remote_accelerator:0", "cpu"))
    assert lower.lm_head.weight is lower.transformer.wte.weight
    assert lower.dtype is torch.bfloat16
    assert torch.equal(lower(prompt.to("remote_accelerator:0")).logits.cpu(), expected(prompt).logits)
    trained = [adapted(model, prompt.to(model.device)) for model in (remote, local)]
    for name, weight in trained[0].items():
        assert torch.equal(weight.cpu(), trained[1][name]), name
    assert djinn.stats()["bytes_sent"] - before < local.num_parameters() * 4 / 4
    for name, weight in djinn.models.load("gpt").items():
        assert torch.equal(weight.cpu(), local.state_dict()[name]), "stored weights stay when a program has trained"
    djinn.shutdown()


class Adapter(torch.nn.Module):
    """A low-rank change of a layer, which is not trained itself."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        first, last = layer.weight.shape
        self.down = torch.nn.Parameter(torch.full((first, 2), 0.01, device=layer.weight.device))
        self.up = torch.nn.Parameter(torch.zeros(2, last, device=layer.weight.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.down @ self.up


def adapted(model: Any, prompt: torch.Tensor) -> dict[str, torch.Tensor]:
    """Train adapters of a model whose other weights are frozen; return those of the adapters, and the logits."""
    model.requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = Adapter(block.attn.c_attn)
    own = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.SGD(own.values(), 0.5)
    for _ in range(2):
        model(prompt, labels=prompt).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    result = {name: weight.detach() for name, weight in own.items()} | {"logits": model(prompt).logits.detach()}
    for block in model.transformer.h:
        block.attn.c_attn = block.attn.c_attn.layer
    return result


def mapped_bytes(running: Any, file: Path) -> int:
    """Size of the parts of a file that a server's workers have mapped."""
    maps = (Path(f"/proc/{worker}/maps").read_text().splitlines() for worker in running.workers)
    ends = [line.split()[0].partition("-") for lines in maps for line in lines if line.endswith(str(file))]
    return sum(int(end, 16) - int(begin, 16) for begin, _, end in ends)


def test_a_model_that_fits_no_server_is_split_over_two_and_each_maps_its_part(store: Path, start_server: Any) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    local = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=256, n_head=2, n_positions=64, vocab_size=200, bos_token_id=1,
                                       eos_token_id=2)).eval()
    local.save_pretrained(store / "gpt")
    size_bytes, limit_mib = local.num_parameters() * 4, 4
    servers = [start_server("--models", str(store), "--memory-mib", str(limit_mib)) for _ in range(2)]
    session = djinn.init(servers=[running.address for running in servers], placement="automatic", recovery="none")
    with torch.device("meta"):
        remote = GPT2LMHeadModel(local.config).eval()
    remote.load_state_dict(djinn.models.load("gpt"), strict=False, assign=True)
    remote.tie_weights()
    djinn.flush()
    weights = [weight for layer in remote.transformer.h for weight in layer.parameters() if weight.dim() > 1]
    homes = [fleet_of(session).where.home_of(weight._value.slot.number) for weight in weights]
    assert homes == sorted(homes, reverse=homes[0] == 1), "layers that follow each other are together"
    prompt = torch.arange(3, 6)[None]
    with torch.inference_mode():
        assert torch.equal(remote(prompt.to("remote_accelerator:0")).logits.cpu(), local(prompt).logits)
    generated = remote.generate(prompt.to("remote_accelerator:0"), max_new_tokens=4, do_sample=False)
    assert torch.equal(generated.cpu(), local.generate(prompt, max_new_tokens=4, do_sample=False))
    parts = [mapped_bytes(running, store / "gpt" / "model.safetensors") for running in servers]
    assert max(parts) < limit_mib * 2**20 < size_bytes, parts
    assert sum(parts) > size_bytes * 0.9
    counts = djinn.stats()
    assert counts["bytes_sent"] + counts["bytes_received"] < size_bytes / 10
    assert counts["bytes_transferred"] < size_bytes / 10, "from server to server"
    # By its size in the file, the model leaves too little memory for this. Mapped, it takes none of it.
    longer = torch.arange(3, 63)[None]
    with torch.inference_mode():
        assert torch.equal(remote(longer.to("remote_accelerator:0")).logits.cpu(), local(longer).logits)
    djinn.shutdown()


def test_a_server_without_models_says_so(session: Any) -> None:
    with pytest.raises(ConfigurationError, match="djinn serve --models DIR"):
        djinn.models.list()


def test_no_weight_passes_through_the_client(store: Path, start_server: Any) -> None:
    weight = torch.full((LARGE_BYTES // 40,), 0.5)
    save_file({f"w{number}": weight.clone() for number in range(10)}, store / "large.safetensors")
    running = start_server("--models", str(store))
    done = run_python(CLIENT, running.address, has_djinn=True)
    assert done.returncode == 0, done.stderr
    total, grown_bytes, sent_bytes, received_bytes = map(float, done.stdout.split())
    assert total == LARGE_BYTES / 4 * 0.5
    assert grown_bytes <= GROWTH_BYTES
    assert sent_bytes + received_bytes < 10**6


def test_a_file_that_the_server_lacks_is_sent_once_and_kept_for_its_tenant(
    store: Path, start_server: Any, tmp_path: Path
) -> None:
    tokens = TokenFile(tmp_path / "tokens.json")
    first, other = tokens.create("first", models=["plain", "ow*"]), tokens.create("other", models=["owner"])
    mine, size = tmp_path / "mine.safetensors", 8 * 2**20
    save_file({"w": torch.arange(size // 4, dtype=torch.float32)}, mine)
    running = start_server("--models", str(store), "--keep-models-mib", "32", "--tokens", str(tokens.path),
                           "--sandbox", "auto", "--gated-model", "plain", "--gated-model", "owner/*")
    for token, is_sent in ((first, True), (first, False), (other, True)):
        djinn.init(server=running.address, token=token)
        names = [model.name for model in djinn.models.list()]
        before = djinn.stats()["bytes_sent"]
        weight = load_file(mine, device="remote_accelerator:0")["w"]
        assert torch.equal(weight[-3:].cpu(), torch.arange(size // 4 - 3, size // 4, dtype=torch.float32))
        sent = djinn.stats()["bytes_sent"] - before
        assert size <= sent < 1.1 * size if is_sent else sent < 20_000
        assert [model.name for model in djinn.models.list()] == names, "it is not listed"
        assert names == (["owner/sharded", "plain", "whole"] if token == first else ["whole"])
        if token == first:
            gated = tensors_of("plain").tensors[0]
            assert djinn.models.load("plain")["x"].sum().item() == 5
    with pytest.raises(ConfigurationError, match="No model plain is stored"):
        djinn.models.load("plain")
    with pytest.raises(RuntimeError, match="No file with the digest"):
        made(torch.empty(0, device=DEVICE), gated).sum().item()
    djinn.shutdown()
