"""Weights that a program reads here, and then moves to a server that has the same file: they are not sent."""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.warm import run_djinn

import djinn
from djinn.errors import ConfigurationError
from djinn_plugins.server.tokens.tokens import TokenFile

safetensors = pytest.importorskip("safetensors.torch")

DEVICE = "remote_accelerator:0"
LITTLE_BYTES = 10**6
"""Of what may be sent for a model that the server has."""
SCRIPT = """
import sys
import torch
from safetensors.torch import load_file
weights = load_file(sys.argv[1])
model = torch.nn.ParameterDict({f"of_{number}": weight for number, weight in enumerate(weights.values())})
model.to("cuda")
assert all(weight.is_cuda for weight in model.values())
print(float(sum(weight.double().sum() for weight in model.values())))
"""


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {f"layer{number}.weight": torch.randn(1200, 900, generator=generator) for number in range(5)}
    half = torch.randn(300, 500, generator=generator).half()
    others = {"half": half, "zeros": torch.zeros(1200, 900), "square": torch.randn(200, 200, generator=generator)}
    return {**made, **others, "bias": torch.randn(900, generator=generator)}


WEIGHTS = weights()
SIZE_BYTES = sum(weight.nbytes for weight in WEIGHTS.values())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders: the server's, and the client's, with equal files."""
    theirs, mine = (tmp_path_factory.mktemp(name) for name in ("models", "mine"))
    for folder in (theirs, mine):
        safetensors.save_file(WEIGHTS, folder / "model.safetensors")
    torch.save(WEIGHTS, theirs / "model.pt")
    shutil.copy(theirs / "model.pt", mine)
    return theirs, mine


@pytest.fixture(scope="module")
def server(files: tuple[Path, Path], start_server_of_module: Any) -> Any:
    return start_server_of_module("--models", str(files[0]), "--sandbox", "auto")


@pytest.fixture
def session(server: Any) -> Iterator[Any]:
    yield djinn.init(server=server.address)
    djinn.shutdown()


def sent_bytes() -> int:
    return djinn.stats()["bytes_sent"]


def read_slices(path: Path) -> dict[str, torch.Tensor]:
    with safetensors.safe_open(path, "pt") as file:
        return {name: file.get_slice(name)[...] for name in file.keys()}  # noqa: SIM118  # it is no dict


READERS = {
    "load_file": lambda folder: safetensors.load_file(folder / "model.safetensors"),
    "safe_open": lambda folder: read_slices(folder / "model.safetensors"),
    "copied": lambda folder: {
        name: weight.clone() for name, weight in safetensors.load_file(folder / "model.safetensors").items()},
    "torch.load": lambda folder: torch.load(folder / "model.pt"),
    "torch.load mapped": lambda folder: torch.load(folder / "model.pt", mmap=True),
}


@pytest.mark.parametrize("read", list(READERS.values()), ids=list(READERS))
def test_what_was_read_and_is_moved_is_not_sent(session: Any, files: tuple[Path, Path], read: Any) -> None:
    assert SIZE_BYTES > 20 * 10**6
    local = read(files[1])
    before = sent_bytes()
    moved = {name: weight.to(DEVICE) for name, weight in local.items()}
    djinn.synchronize()
    assert sent_bytes() - before < LITTLE_BYTES
    for name, weight in WEIGHTS.items():
        assert moved[name].dtype is weight.dtype
        assert torch.equal(moved[name].cpu(), weight), name
    moved["layer0.weight"].zero_()
    assert torch.equal(local["layer0.weight"], WEIGHTS["layer0.weight"])
    assert torch.equal(local["layer0.weight"].to(DEVICE).cpu(), WEIGHTS["layer0.weight"])


def in_hub(folder: Path) -> Path:
    """A file as Hugging Face's hub keeps it: named by the digest that it once had, behind a link."""
    blob = folder / "blobs" / hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    blob.parent.mkdir()
    (folder / "model.safetensors").rename(blob)
    link = folder / "snapshots" / "revision" / "model.safetensors"
    link.parent.mkdir(parents=True)
    link.symlink_to(Path("../..", "blobs", blob.name))
    return link


@pytest.mark.parametrize("is_mapped", [False, True], ids=["written", "mapped"])
@pytest.mark.parametrize("place", ["folder", "hub", "memory"])
def test_a_file_that_was_edited_in_place_is_not_taken_for_the_servers(
    session: Any, files: tuple[Path, Path], tmp_path: Path, place: str, is_mapped: bool
) -> None:
    memory = Path("/dev/shm")  # a file system in memory
    if place == "memory" and not memory.is_dir():
        pytest.skip("no file system in memory")
    with tempfile.TemporaryDirectory(dir=memory if place == "memory" else tmp_path) as made:
        path = Path(shutil.copy(files[1] / "model.safetensors", made))
        path = in_hub(path.parent) if place == "hub" else path
        times, size = path.stat(), path.stat().st_size
        edited = {**WEIGHTS, "layer3.weight": WEIGHTS["layer3.weight"].clone()}
        edited["layer3.weight"][10, 10] += 1
        safetensors.save_file(edited, tmp_path / "edited")
        with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapping:
            # The system notes the first write to a page only, until it has written that to the disk.
            mapping[:] = mapping[:]
            for expected in (WEIGHTS, edited):
                before = sent_bytes()
                for loaded in (djinn.models.load_file(path), safetensors.load_file(path)):
                    assert torch.equal(loaded["layer3.weight"].to(DEVICE).cpu(), expected["layer3.weight"])
                assert (sent_bytes() - before < LITTLE_BYTES) == (expected is WEIGHTS)
                if is_mapped:
                    mapping[:] = (tmp_path / "edited").read_bytes()
                else:
                    path.write_bytes((tmp_path / "edited").read_bytes())
                    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_dtypes_are_converted_on_the_server_before_or_after_the_move(session: Any, files: tuple[Path, Path]) -> None:
    local = READERS["load_file"](files[1])
    before = sent_bytes()
    for dtype in (torch.float16, torch.bfloat16):
        for name, weight in WEIGHTS.items():
            assert torch.equal(local[name].to(DEVICE, dtype).cpu(), weight.to(dtype)), name
            assert torch.equal(local[name].to(dtype).to(DEVICE).cpu(), weight.to(dtype)), name
    assert torch.equal(local["half"].float().to(DEVICE).cpu(), WEIGHTS["half"].float())
    assert sent_bytes() - before < LITTLE_BYTES


def test_a_tensor_that_was_changed_after_it_was_read_is_sent(session: Any, files: tuple[Path, Path]) -> None:
    local = READERS["load_file"](files[1])
    before = sent_bytes()
    assert torch.equal(local["layer1.weight"].to(DEVICE).cpu(), WEIGHTS["layer1.weight"])
    assert sent_bytes() - before < LITTLE_BYTES
    # None of the three places that are sampled.
    local["layer1.weight"][300, 7] += 1
    local["layer2.weight"][-1, -1] = 5
    for name in ("layer1.weight", "layer2.weight"):
        before = sent_bytes()
        assert torch.equal(local[name].to(DEVICE).cpu(), local[name])
        assert not torch.equal(local[name], WEIGHTS[name])
        assert sent_bytes() - before > local[name].nbytes


def test_a_layout_of_its_own_is_sent(session: Any, files: tuple[Path, Path]) -> None:
    local, square = (READERS["load_file"](files[1])[name] for name in ("layer0.weight", "square"))
    for made in (square.t(), local.t(), local[:, ::2], local[10:500], local.view(1200, 30, 30)):
        moved = made.to(DEVICE)
        assert torch.equal(moved.cpu(), made)
        assert moved.stride() == made.to("cpu", copy=True).stride()


def test_a_file_that_changed_after_it_was_read_is_not_taken(session: Any, tmp_path: Path, files: tuple[Path, Path]
                                                          ) -> None:
    mine = tmp_path / "mine.safetensors"
    shutil.copy(files[1] / "model.safetensors", mine)
    local = {name: weight.clone() for name, weight in safetensors.load_file(mine).items()}
    before = sent_bytes()
    assert torch.equal(local["layer0.weight"].to(DEVICE).cpu(), WEIGHTS["layer0.weight"])
    assert sent_bytes() - before < LITTLE_BYTES
    status, other = mine.stat(), weights(1)
    safetensors.save_file(other, tmp_path / "other.safetensors")
    mine.write_bytes((tmp_path / "other.safetensors").read_bytes())
    os.utime(mine, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert mine.stat().st_size == status.st_size
    for name, weight in {**local, **{f"other {name}": weight for name, weight in other.items()}}.items():
        assert torch.equal(weight.to(DEVICE).cpu(), weight), name
    for name, weight in safetensors.load_file(mine).items():
        assert torch.equal(weight.to(DEVICE).cpu(), other[name]), name


def test_a_module_moves_with_its_ties_and_trains_as_here(session: Any, files: tuple[Path, Path]) -> None:
    local = READERS["load_file"](files[1])
    modules = []
    for _ in range(2):
        module = torch.nn.ModuleDict({name: torch.nn.Linear(900, 1200, bias=False) for name in ("first", "tied")})
        module["first"].weight = torch.nn.Parameter(local["layer0.weight"].clone())
        module["tied"].weight = module["first"].weight
        module["frozen"] = torch.nn.Linear(900, 1200).requires_grad_(False)
        module["frozen"].load_state_dict({"weight": local["layer1.weight"], "bias": torch.zeros(1200)}, assign=True)
        modules.append(module)
    before = sent_bytes()
    remote = modules[0].to(DEVICE)
    assert remote["tied"].weight is remote["first"].weight
    assert isinstance(remote["first"].weight, torch.nn.Parameter)
    for module in modules:
        x = torch.ones(2, 900, device=module["first"].weight.device)
        (module["first"](x) * module["frozen"](x) + module["tied"](x)).sum().backward()
        torch.optim.SGD([module["first"].weight], 0.1).step()
    assert remote["frozen"].weight.grad is None
    assert torch.equal(remote["first"].weight.cpu(), modules[1]["first"].weight)
    assert sent_bytes() - before < LITTLE_BYTES
    assert torch.equal(local["layer0.weight"].to(DEVICE).cpu(), WEIGHTS["layer0.weight"]), "the stored one stays"


def test_weights_that_are_copied_into_a_model_on_the_device_are_not_sent(session: Any, files: tuple[Path, Path]
                                                                        ) -> None:
    local = READERS["load_file"](files[1])
    remote = torch.nn.Linear(900, 1200, bias=False, device=DEVICE)
    before = sent_bytes()
    remote.load_state_dict({"weight": local["layer3.weight"]})
    assert torch.equal(remote.weight.cpu(), WEIGHTS["layer3.weight"])
    assert sent_bytes() - before < LITTLE_BYTES


def test_threads_move_at_once(session: Any, files: tuple[Path, Path]) -> None:
    local, moved = READERS["load_file"](files[1]), dict[tuple[str, int], torch.Tensor]()

    def move(number: int) -> None:
        for name, weight in local.items():
            moved[name, number] = weight.to(DEVICE)

    before = sent_bytes()
    threads = [threading.Thread(target=move, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sent_bytes() - before < LITTLE_BYTES
    assert len(moved) == 4 * len(WEIGHTS)
    for (name, _), weight in moved.items():
        assert torch.equal(weight.cpu(), WEIGHTS[name])


def test_without_a_store_weights_are_sent(files: tuple[Path, Path]) -> None:
    with djinn.session():
        for name, weight in READERS["load_file"](files[1]).items():
            assert torch.equal(weight.to(DEVICE).cpu(), WEIGHTS[name])


def sent_to(device: str, folder: Path) -> int:
    """Move the weights that are read from a file; return how many bytes were sent for that."""
    before = sent_bytes()
    for name, weight in READERS["load_file"](folder).items():
        moved = weight.to(device)
        assert str(moved.device) == device
        assert torch.equal(moved.cpu(), WEIGHTS[name])
    return sent_bytes() - before


def test_where_the_user_places_the_server_of_the_device_is_asked(
    server: Any, start_server: Any, files: tuple[Path, Path]
) -> None:
    djinn.init(servers=[server.address, start_server().address], recovery="none")
    assert sent_to("remote_accelerator:0", files[1]) < LITTLE_BYTES
    assert sent_to("remote_accelerator:1", files[1]) >= SIZE_BYTES
    djinn.shutdown()


@pytest.mark.parametrize("placement", ["automatic", "phases"])
@pytest.mark.parametrize("theirs", ["both have it", "one has it", "they have others of that name"])
def test_where_the_session_places_all_servers_must_have_the_file(
    theirs: str, placement: str, server: Any, start_server: Any, files: tuple[Path, Path], tmp_path: Path
) -> None:
    safetensors.save_file(weights(1), tmp_path / "model.safetensors")
    second = {"both have it": ("--models", str(files[0])), "one has it": (),
              "they have others of that name": ("--models", str(tmp_path))}[theirs]
    addresses = [server.address, start_server(*second).address]
    for servers in (addresses, addresses[::-1]):
        djinn.init(servers=servers, recovery="none", placement=placement)
        sent = sent_to(DEVICE, files[1])
        before = sent_bytes()
        loaded = safetensors.load_file(files[1] / "model.safetensors", device=DEVICE)
        assert all(torch.equal(weight.cpu(), WEIGHTS[name]) for name, weight in loaded.items())
        loading = sent_bytes() - before
        if theirs == "both have it":
            assert max(sent, loading) < LITTLE_BYTES
            assert {model.name for model in djinn.models.list()} == {"model", "model.pt"}
            assert torch.equal(djinn.models.load("model")["half"].cpu(), WEIGHTS["half"])
        else:
            assert min(sent, loading) >= SIZE_BYTES
            why = f"{addresses[1]}: This server has no models" if theirs == "one has it" else "different models"
            with pytest.raises(ConfigurationError, match=re.escape(why)):
                djinn.models.load("model")
        djinn.shutdown()


def test_a_tenant_sends_what_it_may_not_load(start_server: Any, files: tuple[Path, Path], tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "tokens.json")
    entitled, other = tokens.create("entitled", models=["model"]), tokens.create("other")
    running = start_server("--models", str(files[0]), "--tokens", str(tokens.path), "--gated-model", "model*",
                           "--sandbox", "auto")
    for token, is_sent in ((entitled, False), (other, True)):
        djinn.init(server=running.address, token=token)
        before = sent_bytes()
        for name, weight in READERS["load_file"](files[1]).items():
            assert torch.equal(weight.to(DEVICE).cpu(), WEIGHTS[name])
        sent = sent_bytes() - before
        assert sent >= SIZE_BYTES if is_sent else sent < LITTLE_BYTES
    assert not any(model.name == "model" for model in djinn.models.list())
    djinn.shutdown()


def test_a_file_that_the_server_keeps_is_sent_whole_when_a_module_with_most_of_it_moves(
    start_server: Any, tmp_path: Path, files: tuple[Path, Path]
) -> None:
    (tmp_path / "models").mkdir()
    running = start_server("--models", str(tmp_path / "models"), "--keep-models-mib", "64")
    path = files[1] / "model.safetensors"
    # An archive with the same tensors was read, too; one file is enough.
    torch.save(WEIGHTS, tmp_path / "same.pt")
    torch.load(tmp_path / "same.pt")
    least = {"alone": SIZE_BYTES, "a part": WEIGHTS["layer0.weight"].nbytes, "whole": SIZE_BYTES, "again": 0,
             "again alone": 0}
    for how, least_bytes in least.items():
        djinn.init(server=running.address)
        local = safetensors.load_file(path)
        module = torch.nn.ParameterDict({f"of_{number}": weight for number, weight in enumerate(local.values())})
        if how == "a part":
            module = torch.nn.ParameterDict({"of_0": local["layer0.weight"]})
        before = sent_bytes()
        moved = [weight.to(DEVICE) for weight in local.values()] if "alone" in how else [*module.to(DEVICE).values()]
        for weight, expected in zip(moved, [WEIGHTS["layer0.weight"]] if how == "a part" else
                                    [WEIGHTS[name] for name in local], strict=True):
            assert torch.equal(weight.cpu(), expected)
        assert least_bytes <= sent_bytes() - before < 1.1 * least_bytes + LITTLE_BYTES, how
    djinn.shutdown()


def test_a_pretrained_model_that_is_moved_is_not_sent(start_server: Any, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(4)
    config = GPT2Config(n_layer=2, n_embd=384, n_head=2, n_positions=64, vocab_size=5000, bos_token_id=1,
                        eos_token_id=2)
    written = GPT2LMHeadModel(config).eval()
    for folder in ("models/gpt", "mine"):
        written.save_pretrained(tmp_path / folder, max_shard_size="8MB")
    djinn.init(server=start_server("--models", str(tmp_path / "models"), "--sandbox", "auto").address)
    prompt = torch.arange(3, 9)[None]
    for dtype in (torch.float32, torch.bfloat16):
        local = GPT2LMHeadModel.from_pretrained(tmp_path / "mine", dtype=dtype).eval()
        before = sent_bytes()
        remote = GPT2LMHeadModel.from_pretrained(tmp_path / "mine", dtype=dtype).eval().to(DEVICE)
        assert remote.lm_head.weight is remote.transformer.wte.weight
        for name, weight in local.state_dict().items():
            assert torch.equal(remote.state_dict()[name].cpu(), weight), name
        assert torch.equal(remote(prompt.to(DEVICE)).logits.cpu(), local(prompt).logits)
        assert sent_bytes() - before < LITTLE_BYTES
    djinn.shutdown()


def test_a_script_that_says_cuda_sends_no_weights(server: Any, files: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    there = run_djinn("run", "--server", server.address, "--as", "cuda", "script.py",
                      str(files[1] / "model.safetensors"), folder=tmp_path)
    assert there.returncode == 0, there.stderr
    assert float(there.stdout) == pytest.approx(sum(float(weight.double().sum()) for weight in WEIGHTS.values()))
    sent = re.search(r"([\d.]+) (B|kB) sent", there.stderr)
    assert sent is not None, there.stderr


def test_a_variant_is_loaded_from_the_server(start_server: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=64, n_head=2, n_positions=64, vocab_size=5000, bos_token_id=1, eos_token_id=2)
    plain, half = GPT2LMHeadModel(config), GPT2LMHeadModel(config).half()
    for folder in ("models/gpt", "models/gated", "mine"):
        plain.save_pretrained(tmp_path / folder)
        half.save_pretrained(tmp_path / folder, variant="fp16")
    shutil.copytree(tmp_path / "mine", tmp_path / "gpt", ignore=shutil.ignore_patterns("model*"))
    djinn.init(server=start_server("--models", str(tmp_path / "models"), "--gated-model", "gated").address)
    assert [(model.name, model.variant) for model in djinn.models.list()] == [("gpt", ""), ("gpt", "fp16")]
    for folder in ("mine", "gpt"):
        for model, options in ((plain, {"dtype": torch.float32}),
                               (half, {"dtype": torch.float16, "variant": "fp16"})):
            before = sent_bytes()
            remote = GPT2LMHeadModel.from_pretrained(tmp_path / folder, device_map=DEVICE, **options)
            for name, weight in model.state_dict().items():
                assert torch.equal(remote.state_dict()[name].cpu(), weight), (folder, name)
            assert sent_bytes() - before < 0.1 * model.num_parameters() * 2
    name = "transformer.wte.weight"
    assert djinn.models.load("gpt")[name].dtype is torch.float32
    assert torch.equal(djinn.models.load("gpt", revision="fp16")[name].cpu(), half.state_dict()[name])
    with pytest.raises(OSError, match=r"no file named model\.ema\.safetensors"):
        GPT2LMHeadModel.from_pretrained(tmp_path / "gpt", device_map=DEVICE, variant="ema")
    djinn.shutdown()
