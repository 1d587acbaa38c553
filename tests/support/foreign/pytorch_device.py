"""The device as PyTorch's own tests want it: the file that ``TORCH_TEST_DEVICES`` names.

PyTorch runs it among the globals of `torch.testing._internal.common_device_type`.
"""

from __future__ import annotations

from torch.testing._internal.common_device_type import PrivateUse1TestBase

import djinn  # noqa: F401  # registers the device


class RemoteAcceleratorTestBase(PrivateUse1TestBase):  # type: ignore[misc]  # a class without types
    """Tests on ``remote_accelerator``; what PyTorch looks for is the device type ``privateuse1``."""


TEST_CLASS = RemoteAcceleratorTestBase
