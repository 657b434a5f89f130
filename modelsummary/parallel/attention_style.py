"""The style of ``nn.MultiheadAttention``, which torch lacks.

``to_code`` copies its source, so it uses torch alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from modelsummary.parallel.replaced_forward import replace_forward

__all__ = ["AttentionParallel"]


class AttentionParallel(ParallelStyle):
    """``nn.MultiheadAttention`` split by heads: each rank computes some of them.

    Args:
        shards: name of a parameter -> its placement.
        input_layouts: of query, key and value. Default: whole.
        output_layouts: of the result. Default: whole.
    """

    def __init__(self, *, shards: dict[str, Any], input_layouts: Any = None, output_layouts: Any = None) -> None:
        self.shards = shards
        self.input_layouts = input_layouts or (Replicate(), Replicate(), Replicate())
        self.output_layouts = output_layouts or Replicate()

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        source = {"src_data_rank": self.src_data_rank} if hasattr(self, "src_data_rank") else {}  # since torch 2.7
        for name, placement in self.shards.items():
            owner, _, attribute = name.rpartition(".")
            parameter = module.get_parameter(name)
            distributed = distribute_tensor(parameter, device_mesh, [placement], **source)
            sharded = nn.Parameter(distributed, requires_grad=parameter.requires_grad)
            module.get_submodule(owner).register_parameter(attribute, sharded)

        def local_parameters(attention: Any) -> dict[str, Any]:
            local = {
                name: parameter.to_local()
                for name, parameter in attention.named_parameters()
                if name != "out_proj.bias"
            }
            if attention.out_proj.bias is not None:  # a rank that adds it to a chunk has a part of its gradient
                parts = Replicate() if self.output_layouts.is_replicate() else Partial()
                local["out_proj.bias"] = attention.out_proj.bias.to_local(grad_placements=[parts])
            return local

        def summed(tensor: Any, layout: Any) -> Any:  # the gradient of an input is summed over the ranks
            dtensor = DTensor.from_local(tensor, device_mesh, [layout], run_check=False)
            return dtensor.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

        def leave(tensor: Any, placement: Any, layout: Any) -> Any:
            dtensor = DTensor.from_local(tensor, device_mesh, [placement], run_check=False)
            return dtensor.redistribute(placements=[layout]).to_local()

        replace_forward(module, self.forward_of(device_mesh.get_local_rank(), local_parameters, summed, leave))
        return module

    def forward_of(self, rank: int, parameters: Any, enter: Any, leave: Any) -> Any:
        """Return the forward of one rank, as ``replace_forward`` takes it.

        Args:
            parameters: returns the local parameters of the module by name.
            enter: called with each input, once, and its layout.
            leave: called with the local part of a result, its placement, and the layout that it gets.
        """

        def forward(
            module: Any,
            _forward: Any,
            /,
            query: Any,
            key: Any,
            value: Any,
            key_padding_mask: Any = None,
            need_weights: bool = True,
            attn_mask: Any = None,
            average_attn_weights: bool = True,
            is_causal: bool = False,
        ) -> Any:
            local = parameters(module)
            tensors = {id(tensor): tensor for tensor in (query, key, value)}
            layouts = {
                id(tensor): layout for tensor, layout in zip((query, key, value), self.input_layouts, strict=True)
            }
            entered = {identity: enter(tensor, layouts[identity]) for identity, tensor in tensors.items()}
            inputs = [entered[id(tensor)] for tensor in (query, key, value)]
            q, k, v = self._projected(module, local, inputs)
            if attn_mask is not None and attn_mask.dim() == 3:  # one mask per head and row of the batch
                attn_mask = attn_mask.unflatten(0, (-1, module.num_heads)).narrow(1, rank * q.shape[1], q.shape[1])
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.view(q.shape[0], 1, 1, -1)
            is_causal = is_causal and key_padding_mask is None and not need_weights
            mask = self._added([None if is_causal else attn_mask, key_padding_mask], q.dtype)
            dropout, weights = module.dropout if module.training else 0.0, None
            if need_weights:
                scores = q @ k.transpose(-2, -1) / module.head_dim**0.5
                weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
                result = weights @ v
            else:
                result = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
            if inputs[0].dim() == 2:
                result, weights = result.squeeze(0).transpose(0, 1), None if weights is None else weights.squeeze(0)
            else:
                result = result.transpose(1, 2) if module.batch_first else result.permute(2, 0, 1, 3)
            result = leave(F.linear(result.flatten(-2), local["out_proj.weight"]), Partial(), self.output_layouts)
            if "out_proj.bias" in local:
                result = result + local["out_proj.bias"]
            if weights is not None:
                mean, heads = weights.sum(-3) / module.num_heads, Shard(weights.dim() - 3)
                tensor, placement = (mean, Partial()) if average_attn_weights else (weights, heads)
                weights = leave(tensor, placement, Replicate())
            return result, weights

        return forward

    def _projected(self, module: Any, local: dict[str, Any], inputs: Any) -> Any:
        """Return query, key and value of this rank: batch x heads x length x features of a head."""
        if "in_proj_weight" in local:
            weights = local["in_proj_weight"].chunk(3)
        else:
            weights = [local[f"{name}_proj_weight"] for name in "qkv"]
        biases = local["in_proj_bias"].chunk(3) if "in_proj_bias" in local else [None] * 3
        projected = []
        for tensor, weight, bias in zip(inputs, weights, biases, strict=True):
            heads = F.linear(tensor, weight, bias).unflatten(-1, (-1, module.head_dim))
            if tensor.dim() == 2:
                heads = heads.unsqueeze(0)
            elif not module.batch_first:
                heads = heads.transpose(0, 1)
            projected.append(heads.transpose(1, 2))
        return projected

    def _added(self, masks: Any, dtype: Any) -> Any:
        """Return the sum of masks as numbers that are added to the scores; None without a mask."""
        present = [mask for mask in masks if mask is not None]
        biases = [
            torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf")) if mask.dtype == torch.bool else mask
            for mask in present
        ]
        return sum(biases[1:], biases[0]) if biases else None
