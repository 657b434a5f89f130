"""A stage for torch's engine that trains like one process, under each of the engine's schedules.

The engine splits backwards into a part for inputs and one for weights, sends gradients as they lie, hands keyword
arguments to every stage, scales gradients that were there before the step, and knows no parameter that several stages
hold. ``EngineStage`` corrects this, so a schedule made by hand trains like one that ``Stages.schedule`` makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from modelsummary import _torch
from modelsummary.capture.backward_halves import DeferredNode, backward_of_inputs, backward_of_weights, has_halves
from modelsummary.capture.templates import leaves_of, taken_apart

__all__ = ["EngineStage", "RankGradients", "SharedOwners"]


class SharedOwners(NamedTuple):
    """A parameter that stages of several ranks hold.

    Attributes:
        names: index of a stage -> its name there.
        ranks: of the pipeline's group, in order.
    """

    names: Mapping[int, str]
    ranks: Sequence[int]


class RankGradients:
    """The gradients of all stages of a rank in one step.

    Attributes:
        stages: of this rank.
        shared: the parameters that it shares with other ranks.
        group: process group of the pipeline.
    """

    def __init__(self, shared: Sequence[SharedOwners], group: dist.ProcessGroup | None) -> None:
        self.stages: list[EngineStage] = []
        self.shared, self.group = shared, group
        self._before: dict[int, tuple[nn.Parameter, Tensor]] | None = None
        self._finished: set[int] = set()

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the stages, each once: their shards under FSDP, gathered or not."""
        return list(
            {id(parameter): parameter for stage in self.stages for _, parameter in _named(stage.submod)}.values()
        )

    def begin(self, stage: int) -> None:
        """Put gradients of earlier steps aside, which this step neither scales nor sums.

        After a step that raised, drop its gradients first, and take those before it.
        """
        self._finished.discard(stage)
        if any(part.open_chunks for part in self.stages):
            for parameter in self.parameters():
                _, parameter.grad = (self._before or {}).get(id(parameter), (parameter, None))
            self._before = None
            for part in self.stages:
                part.open_chunks = 0
        if self._before is None:
            self._before = {}
            for parameter in self.parameters():
                if parameter.grad is not None:
                    self._before[id(parameter)] = (parameter, parameter.grad)
                    parameter.grad = None

    @torch.no_grad()
    def finish(self, stage: int, factor: int) -> None:
        """Note that a stage has its gradients. After the last stage: scale, sum over owners, add to earlier ones.

        No other rank waits for this one then, so that ranks can wait for each other.
        """
        self._finished.add(stage)
        if self._before is None or len(self._finished) < len(self.stages):
            return
        parameters = self.parameters()
        for parameter in parameters:
            if parameter.grad is not None and factor != 1:
                parameter.grad.div_(factor)
        for shared, ranks in self._own_shared():
            if shared.requires_grad:
                shared.grad = _laid_out(torch.zeros_like(shared) if shared.grad is None else shared.grad, shared)
                local = _local(shared.grad)
                copies = self._exchanged(local, ranks)
                local.copy_(sum(copies[1:], copies[0].clone()))  # in the order of ranks: equal bits on all
        for parameter, gradient in self._before.values():
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self._before = None
        self._finished.clear()

    @torch.no_grad()
    def copy_from_first(self) -> None:
        """Give parameters that several ranks hold the values of the first of them."""
        for shared, ranks in self._own_shared():
            local = _local(shared.detach())
            local.copy_(self._exchanged(local, ranks)[0])

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients by the norm over the parameters of all stages, each once. Return that norm."""
        rank = dist.get_rank(self.group)
        elsewhere = {id(shared) for shared, ranks in self._own_shared() if ranks[0] != rank}
        parameters = self.parameters()
        grads = [
            parameter.grad for parameter in parameters if parameter.grad is not None and id(parameter) not in elsewhere
        ]
        norm: Any = get_total_norm(grads, norm_type)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        norm = norm.detach().to(self.stages[0].device, copy=True)  # the norm of no gradients is on the CPU
        is_max = norm_type == float("inf")
        power: Tensor = norm if is_max else norm**norm_type
        dist.all_reduce(power, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=self.group)
        total = power if is_max else power ** (1.0 / norm_type)
        clip_grads_with_norm_(parameters, max_norm, total)
        return total

    def _own_shared(self) -> Iterator[tuple[nn.Parameter, Sequence[int]]]:
        for names, ranks in self.shared:
            stage = next(stage for stage in self.stages if stage.stage_index in names)
            yield dict(_named(stage.submod))[names[stage.stage_index]], ranks

    def _exchanged(self, tensor: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        """Return the tensors of these ranks, which all call this."""
        group: Any = self.group or dist.group.WORLD
        this_rank = dist.get_rank(self.group)
        tensor = tensor.contiguous()
        copies = {rank: tensor if rank == this_rank else torch.empty_like(tensor) for rank in ranks}
        operations = []
        for rank in ranks:
            if rank != this_rank:
                peer = dist.get_global_rank(group, rank)
                operations += [
                    dist.P2POp(dist.isend, tensor, peer, group),
                    dist.P2POp(dist.irecv, copies[rank], peer, group),
                ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        return list(copies.values())


class EngineStage(PipelineStage):
    """A ``PipelineStage`` with the gradients of one process.

    Attributes:
        gradients: of all stages of this rank.
        keeps_results: the schedule can join results of any class. Else ``step`` returns the tensors in them.
        open_chunks: micro-batches whose backward has not ended; not 0 after a step that raised.
    """

    keeps_results = False
    open_chunks = 0

    def __init__(self, module: nn.Module, *args: Any, gradients: RankGradients, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        self.gradients = gradients
        gradients.stages.append(self)
        self._result: Any = None

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of this rank by the norm over all stages. Every rank of the pipeline calls it.

        Returns:
            The norm over all parameters of the model, each counted once, as ``torch.nn.utils.clip_grad_norm_`` does.
        """
        return self.gradients.clip_grad_norm_(max_norm, norm_type)

    # ------------------------------------------------------------------------- what the engine calls

    def clear_runtime_states(self) -> None:
        """Begin a step."""
        super().clear_runtime_states()
        if self.has_backward:
            self.gradients.begin(self.stage_index)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stage. Return tensors: contiguous ones to send, for the last stage those in its result."""
        out: Any = super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        if not self.is_last:
            return tuple(tensor.contiguous() for tensor in out) if isinstance(out, tuple) else out.contiguous()
        self._result = out
        if isinstance(out, Tensor) or (type(out) in (tuple, list) and all(isinstance(value, Tensor) for value in out)):
            return out
        return tuple(leaf for leaf in leaves_of(taken_apart(out)) if isinstance(leaf, Tensor))

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, kwargs: Any = None, *others: Any, **options: Any) -> Any:
        """Run a micro-batch. Only the first stage takes the model's keyword arguments."""
        self.open_chunks += self.has_backward
        out = super().forward_one_chunk(fwd_chunk_id, args, kwargs if self.is_first else {}, *others, **options)
        if not self.is_last:
            return out
        result, self._result = self._result, None
        if out is not result and self.output_chunks and self.output_chunks[-1] is out:
            # The engine joins tensors alone, along their first dimension.
            parts = tuple(tensor.unsqueeze(0) if not tensor.dim() else tensor for tensor in out)
            self.output_chunks[-1] = result if self.keeps_results else parts
        return result

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        """Run a backward, or a half of it. The first half does all of it where the halves would lose gradients."""
        if backward_type == "weight":
            backward_of_weights(bwd_kwargs["param_groups"])
            self.open_chunks -= 1
            return (), None
        later: list[DeferredNode] = []
        if backward_type == "input":
            outputs, received = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
            inputs, weights = bwd_kwargs["input_values"], list(self.submod.parameters())
            if not isinstance(self.submod, DistributedDataParallel) and has_halves(outputs, inputs, weights):
                if isinstance(self.submod, FSDPModule):
                    self.submod.set_reshard_after_backward(False)
                    self.submod.set_requires_gradient_sync(False)
                gradients, later = backward_of_inputs(outputs, received, inputs, weights)
            else:
                whole = {**bwd_kwargs, "stage_output": outputs[0] if received is None else outputs}  # the loss alone
                gradients, _ = super().backward_maybe_with_nosync("full", whole, last_backward)
        else:
            gradients, _ = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            self.open_chunks -= 1
        return tuple(
            gradient.contiguous() if isinstance(gradient, Tensor) else gradient for gradient in gradients
        ), later

    def scale_grads(self, grad_scale_factor: int) -> None:
        """End the step of this stage; called after its last backward."""
        if self.has_backward:
            self.gradients.finish(self.stage_index, grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """End the step of this stage, after FSDP has reduced its gradients."""
        super().perform_reduce_grad(grad_scale_factor)
        if grad_scale_factor == 1:  # for which the engine does not scale
            self.scale_grads(1)

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        """End the step of this stage, after FSDP has reduced its gradients."""
        super().wait_for_gradient_reduction(grad_scale_factor)  # type: ignore[misc, unused-ignore]  # torch 2.15
        if grad_scale_factor == 1:
            self.scale_grads(1)


def _named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a stage with their names; under FSDP their shards, also where they are gathered."""
    shards = _torch.gathered_parameters(module)
    return [
        (name, shards.get(id(parameter), parameter))
        for name, parameter in module.named_parameters(remove_duplicate=False)
    ]


def _laid_out(gradient: Any, parameter: Any) -> Any:
    """Return a gradient with the placements of its parameter, where both are distributed."""
    if getattr(gradient, "placements", None) == getattr(parameter, "placements", None):
        return gradient
    return gradient.redistribute(placements=parameter.placements)


def _local(tensor: Any) -> Tensor:
    """Return a tensor, or the local part of a distributed one."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
