"""The device as transformers' own tests want it: the file that ``TRANSFORMERS_TEST_DEVICE_SPEC`` names.

The file is copied to where the tests run, because transformers imports it by its path relative to that folder.
"""

from __future__ import annotations

import torch

import djinn  # noqa: F401  # registers the device

DEVICE_NAME = "remote_accelerator"
MANUAL_SEED_FN = torch.remote_accelerator.manual_seed_all  # type: ignore[attr-defined]  # djinn adds the module
EMPTY_CACHE_FN = torch.remote_accelerator.empty_cache  # type: ignore[attr-defined]  # as above
DEVICE_COUNT_FN = torch.remote_accelerator.device_count  # type: ignore[attr-defined]  # as above
