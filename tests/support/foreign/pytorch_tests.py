"""Runs PyTorch's own test files on the device, against the same tests on the CPU, and publishes what differs.

``python -m support.foreign.pytorch_tests --source CHECKOUT [FILE ...] [-- ARGUMENTS]``: arguments are pytest's, for
example ``-k TestViewOps``.
"""

from __future__ import annotations

from pathlib import Path

from support.foreign.chosen import named
from support.foreign.suites import Suite, arguments_of

DEVICE = Path(__file__).with_name("pytorch_device.py")
FILES = ("test_view_ops.py", "test_indexing.py", "test_shape_ops.py", "test_type_promotion.py",
         "test_sort_and_select.py", "test_scatter_gather_ops.py", "test_tensor_creation_ops.py", "test_reductions.py",
         "test_unary_ufuncs.py", "test_binary_ufuncs.py", "test_torch.py", "test_nn.py", "nn/test_convolution.py",
         "nn/test_dropout.py", "nn/test_embedding.py", "nn/test_pooling.py", "test_sparse.py", "test_autograd.py",
         "test_optim.py")
_DEVICE_TYPES = "privateuse1,remote_accelerator"
"""PyTorch's class of tests has the second name from the first file's first class on."""


def main() -> None:
    """Run the files, served, and publish what came of them."""
    options, arguments = arguments_of("PyTorch, of the installed release", "files below test/")
    source = options.source.absolute()
    files = options.names or [file for file in FILES if (source / "test" / file).exists()]
    if not files:
        raise SystemExit(f"{source / 'test'} has none of {', '.join(FILES)}.")
    version = source / "version.txt"
    suite = Suite("pytorch", version.read_text().strip() if version.exists() else "unknown", source / "test", named,
                  cpu={"PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu"},
                  device={"TORCH_TEST_DEVICES": str(DEVICE), "PYTORCH_TESTING_DEVICE_ONLY_FOR": _DEVICE_TYPES})
    raise SystemExit(suite.run({file: file for file in files}, arguments, options.processes))


if __name__ == "__main__":
    main()
