"""Runs other libraries' own tests on the device, against the same tests on the CPU; publishes what differs.

``python -m support.foreign.library_tests LIBRARY --source CHECKOUT [NAME ...] [-- ARGUMENTS]``: a name is a folder or
file below the library's tests, a family of models for transformers; arguments are pytest's, such as ``-k generate``.
The library is that of the checkout, as for its developers.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
from support.foreign.suites import Suite, arguments_of

HERE = Path(__file__).parent
DEVICE = "third_party_device.py"
SAMPLE = ("--one-of", "20")


@attrs.frozen
class Library:
    """How the tests of a library are run.

    Attributes:
        names: What is run if nothing is named.
        tests: Where a name's tests are below the checkout.
        release: The file that states the release.
        packages: The folders of the checkout that tests import from.
        device: The variables by which the tests choose the device.
        variables: What the library's variables for devices of third parties begin with; empty: it has none.
        sample: Arguments of pytest that choose tests, if no others are given.
        device_arguments: Arguments of pytest for tests on the device.
        configuration: The file with pytest's configuration.
    """

    names: Sequence[str]
    tests: str
    release: str
    packages: Sequence[str] = ("src",)
    device: Mapping[str, str] = {"DJINN_RUN_AS": "cuda"}
    variables: str = ""
    sample: Sequence[str] = SAMPLE
    device_arguments: Sequence[str] = ()
    configuration: str = os.devnull

    @property
    def on_the_device(self) -> Mapping[str, str]:
        """All variables by which the tests choose the device."""
        if not self.variables:
            return self.device
        return {**self.device, f"{self.variables}_BACKEND": "djinn", f"{self.variables}_DEVICE": "remote_accelerator",
                f"{self.variables}_DEVICE_SPEC": DEVICE}


LIBRARIES = {
    "accelerate": Library(
        ("test_accelerator.py", "test_big_modeling.py", "test_data_loader.py", "test_grad_sync.py", "test_hooks.py",
         "test_modeling_utils.py", "test_optimizer.py", "test_scheduler.py", "test_state_checkpointing.py",
         "test_utils.py"), "tests/{}", "src/accelerate/__init__.py",
        # One test fills the memory of the device, which is the memory of this machine.
        sample=("--one-of", "2", "-k", "not tied_weights_memory")),
    "diffusers": Library(
        ("schedulers", "models/autoencoders", "models/transformers", "models/unets", "hooks", "others"),
        "tests/{}", "src/diffusers/__init__.py", device={"DJINN_RUN_AS": "accelerator"}, variables="DIFFUSERS_TEST"),
    "lightning": Library(
        ("core", "loops", "models", "trainer/optimization", "tuner", "utilities", "callbacks"),
        "tests/tests_pytorch/{}", "src/version.info", packages=("src", "tests"),
        device={"DJINN_RUN_AS": "accelerator"}),
    "peft": Library(
        ("test_custom_models.py", "test_decoder_models.py", "test_initialization.py", "test_low_level_api.py",
         "test_mixed.py", "test_tuners_utils.py", "test_target_parameters.py", "test_lora_variants.py"),
        "tests/{}", "src/peft/__init__.py", sample=("--one-of", "40")),
    "torchao": Library(
        ("quantization", "core", "integration", "dtypes", "test_low_bit_optim.py", "test_utils.py"),
        # One of 20 tests of quantization takes more than a quarter of an hour.
        "test/{}", "version.txt", packages=(".",), sample=("--one-of", "100")),
    "torchmetrics": Library(
        ("bases", "classification", "regression", "retrieval", "image", "pairwise", "segmentation", "text", "wrappers"),
        "tests/unittests/{}", "src/torchmetrics/__about__.py", packages=("src", "tests"), sample=("--one-of", "100")),
    "transformers": Library(
        ("gpt2", "bert", "llama", "mistral", "qwen2", "gemma", "phi", "mixtral", "t5", "bart", "roberta", "distilbert",
         "opt", "gpt_neox", "vit"), "tests/models/{0}/test_modeling_{0}.py", "src/transformers/__init__.py",
        device={}, variables="TRANSFORMERS_TEST", sample=(), device_arguments=("-p", "transformers_tolerances"),
        configuration="pyproject.toml"),
}


def main() -> None:
    """Run a library's tests, served, and publish what came of them."""
    if sys.argv[1:2] == [] or sys.argv[1] not in LIBRARIES:
        raise SystemExit(f"Name a library first: {', '.join(LIBRARIES)}.")
    name = sys.argv.pop(1)
    library = LIBRARIES[name]
    options, arguments = arguments_of(name, f"below {library.tests}")
    source = options.source.absolute()
    files = {each: library.tests.format(each) for each in options.names or library.names}
    missing = [file for file in files.values() if not (source / file).exists()]
    if missing:
        raise SystemExit(f"{source} has no {', '.join(missing)}.")
    packages = [str(source / folder) for folder in library.packages]
    paths = [*packages, *filter(None, [os.environ.get("PYTHONPATH")])]
    # Nothing is downloaded: what needs the hub fails on the CPU too, at once.
    cpu = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    if library.variables:
        cpu[f"{library.variables}_DEVICE"] = "cpu"
    with tempfile.TemporaryDirectory() as view:
        # A view of the checkout, in which the description of the device can lie: tests run each other by paths
        # relative to the checkout, and the description is imported by such a path.
        for entry in source.iterdir():
            (Path(view) / entry.name).symlink_to(entry)
        shutil.copy(HERE / DEVICE, view)
        suite = Suite(name, _release(source / library.release), Path(view), _named, cpu,
                      device={**cpu, "PYTHONPATH": os.pathsep.join([*paths, str(HERE)]), **library.on_the_device},
                      device_arguments=library.device_arguments, configuration=library.configuration)
        raise SystemExit(suite.run(files, arguments or library.sample, options.processes))


def _release(file: Path) -> str:
    """Read the release from a file that states it, alone or as ``__version__``."""
    stated = re.search(r'__version__ = "(.+?)"|\A(\d\S*)\s*\Z', file.read_text())
    return next(filter(None, stated.groups())) if stated else "unknown"


def _named(test_class: str, name: str) -> str:
    return f"{test_class}.{name}"


if __name__ == "__main__":
    main()
