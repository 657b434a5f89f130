"""Torch's ring attention of the CPU's kernel, which torch itself has for CUDA's kernels alone.

The ring is torch's template, called with the kernel of the CPU, so everything around it runs on gloo.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def add_cpu_rings() -> None:
    """Let ``context_parallel`` run attention on the CPU, in this process, and keep the dtype of its results."""
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder, register_single_dim_strategy
    from torch.distributed.tensor.experimental._context_parallel import _attention as rings

    def forward(
        mesh: Any, query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, **options: Any
    ) -> Any:
        kernel = FORWARD, query, key, value
        return rings._templated_ring_attention(
            mesh.get_group(), 2, *kernel, is_causal=is_causal, dropout_p=dropout_p, **options
        )

    def backward(mesh: Any, grad_out: Any, *tensors_and_options: Any, **options: Any) -> Any:
        *tensors, dropout_p, is_causal = tensors_and_options
        kernel = BACKWARD, grad_out, "grad_out", *tensors
        return rings._templated_ring_attention_backward(
            mesh.get_group(), 2, *kernel, is_causal=is_causal, dropout_p=dropout_p, **options
        )

    def chunks(n_results: int) -> Any:
        def strategy(_operator: Any, args: Any, _kwargs: Any) -> Any:
            n_tensors = n_results + sum(hasattr(each, "shape") for each in args)
            return [[_ShardingPlaceholder(2)] * n_tensors]

        return strategy

    def handler(ring: Any) -> Any:
        def handle(operator: Any, args: Any, kwargs: Any) -> Any:
            info = DTensor._op_dispatcher.unwrap_to_op_info(operator, args, kwargs)
            DTensor._op_dispatcher.sharding_propagator.propagate(info)
            results = ring(info.compute_mesh, *info.local_args, **info.local_kwargs)
            return DTensor._op_dispatcher.wrap(results, info.output_sharding.output_spec)

        return handle

    for operator, ring, n_results in ((FORWARD, forward, 2), (BACKWARD, backward, 3)):
        register_single_dim_strategy(operator, schema_info=RuntimeSchemaInfo(3))(chunks(n_results))
        rings.custom_ops[operator] = handler(ring)
    rings._cp_options.convert_to_f32 = False
