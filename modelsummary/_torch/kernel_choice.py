"""The choice of kernels: autocast, backends of attention and convolutions, devices.

All names hold from torch 2.6 to 2.14.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.conv import _ConvNd as ConvNd
from torch.nn.modules.conv import _ConvTransposeNd as ConvTransposeNd

__all__ = [
    "GLOBAL_DEVICE_CONTEXT",
    "VF",
    "ConvNd",
    "ConvTransposeNd",
    "conv_memory_format",
    "is_any_autocast_enabled",
    "is_onednn_enabled",
    "is_xpu_built",
    "select_conv_backend",
    "sleep_cycles",
]

# The kernel that a convolution uses.
select_conv_backend: Any = torch._C._select_conv_backend
# The memory format of the result of that kernel.
conv_memory_format: Any = torch._C._conv_determine_backend_memory_format
# Whether oneDNN runs recurrent layers on the CPU.
is_onednn_enabled: Any = torch._C._get_mkldnn_enabled
# True if torch was built with support for Intel GPUs.
is_xpu_built: Any = torch.xpu._is_compiled
# Whether autocast is on for any device.
is_any_autocast_enabled: Any = torch._C._is_any_autocast_enabled
# Functions without Python code, such as the recurrent layers.
VF: Any = torch._VF
# The holder of the device set by ``torch.set_default_device``.
GLOBAL_DEVICE_CONTEXT: Any = torch._GLOBAL_DEVICE_CONTEXT
# A kernel that keeps a CUDA device busy for a number of cycles.
sleep_cycles: Any = torch.cuda._sleep
