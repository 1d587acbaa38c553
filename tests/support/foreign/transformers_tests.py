"""Runs transformers' own tests of models on the device, against the same tests on the CPU; publishes what differs.

``python -m support.foreign.transformers_tests --source CHECKOUT [FAMILY ...] [-- ARGUMENTS]``: arguments are pytest's,
for example ``-k generate``. The library is that of the checkout, as for transformers' developers.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from support.foreign.suites import Suite, arguments_of

HERE = Path(__file__).parent
DEVICE = "transformers_device.py"
FAMILIES = ("gpt2", "bert", "llama", "mistral", "qwen2", "gemma", "phi", "mixtral", "t5", "bart", "roberta",
            "distilbert", "opt", "gpt_neox", "vit")


def main() -> None:
    """Run the families' tests, served, and publish what came of them."""
    options, arguments = arguments_of("transformers", "folders below tests/models")
    source = options.source.absolute()
    files = {family: f"tests/models/{family}/test_modeling_{family}.py" for family in options.names or FAMILIES}
    missing = [file for file in files.values() if not (source / file).exists()]
    if missing:
        raise SystemExit(f"{source} has no {', '.join(missing)}.")
    stated = re.search(r'__version__ = "(.+?)"', (source / "src" / "transformers" / "__init__.py").read_text())
    paths = [str(source / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Nothing is downloaded: what needs the hub fails on the CPU too, at once.
    cpu = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths), "TRANSFORMERS_TEST_DEVICE": "cpu"}
    with tempfile.TemporaryDirectory() as view:
        # A view of the checkout, in which the description of the device can lie: tests run each other by paths
        # relative to the checkout, and the description is imported by such a path.
        for entry in source.iterdir():
            (Path(view) / entry.name).symlink_to(entry)
        shutil.copy(HERE / DEVICE, view)
        suite = Suite("transformers", stated[1] if stated else "unknown", Path(view), _named, cpu, device={
            **cpu, "PYTHONPATH": os.pathsep.join([*paths, str(HERE)]), "TRANSFORMERS_TEST_BACKEND": "djinn",
            "TRANSFORMERS_TEST_DEVICE": "remote_accelerator", "TRANSFORMERS_TEST_DEVICE_SPEC": DEVICE},
            device_arguments=["-p", "transformers_tolerances"], configuration="pyproject.toml")
        raise SystemExit(suite.run(files, arguments, options.processes))


def _named(test_class: str, name: str) -> str:
    return f"{test_class}.{name}"


if __name__ == "__main__":
    main()
