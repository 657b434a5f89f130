"""The private names of torch that the package uses. No other module of the package names ``torch._``.

Each file is a part of torch, and says for which versions its names are known to hold. ``object_attributes`` lists the
attributes of torch's objects that are read in place. ``tests/test_torch_names.py`` fails on a torch in which a name is
missing or has another meaning, and for a private name outside of this package.
"""

from __future__ import annotations

from modelsummary._torch import (
    autograd,
    compiling,
    dispatcher,
    distributed,
    fsdp,
    graphs,
    kernel_choice,
    object_attributes,
    pipelining,
    ring_attention,
    swapping,
    tensor_classes,
)
from modelsummary._torch.autograd import *
from modelsummary._torch.compiling import *
from modelsummary._torch.dispatcher import *
from modelsummary._torch.distributed import *
from modelsummary._torch.fsdp import *
from modelsummary._torch.graphs import *
from modelsummary._torch.kernel_choice import *
from modelsummary._torch.object_attributes import *
from modelsummary._torch.pipelining import *
from modelsummary._torch.ring_attention import *
from modelsummary._torch.swapping import *
from modelsummary._torch.tensor_classes import *

__all__: list[str] = []  # each file says what it has
__all__ += autograd.__all__
__all__ += compiling.__all__
__all__ += dispatcher.__all__
__all__ += distributed.__all__
__all__ += fsdp.__all__
__all__ += graphs.__all__
__all__ += kernel_choice.__all__
__all__ += object_attributes.__all__
__all__ += pipelining.__all__
__all__ += ring_attention.__all__
__all__ += swapping.__all__
__all__ += tensor_classes.__all__
