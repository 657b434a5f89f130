"""Train a decoder over four processes: derive a plan, print it, apply it, train, save, and load into the plain model.

    torchrun --nproc-per-node 4 examples/parallel_train.py
    torchrun --nproc-per-node 4 examples/parallel_train.py --dies 2   # a rank dies: the others end with an error

Each pair of ranks (``tensor``) works on the same rows; the two pairs (``shard``) on different ones. The plain model is
trained beside, on all rows, and compared.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from modelsummary import Statistics


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = (
            Attention(width, heads),
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (each(x).view(b, t, -1, self.size).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1))


class Decoder(nn.Module):
    def __init__(self, vocab: int = 64, width: int = 32, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dies", type=int, default=-1, help="rank that ends after the first step")
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, plain = Decoder(), Decoder()
    plain.load_state_dict(model.state_dict())
    rows = torch.randint(0, 64, (8, 17))

    plan = Statistics(model, rows[:4, :-1]).parallel_plan(tensor=2, shard=2)
    memory = plan.memory(int(os.environ["RANK"]), optimizer="adamw")  # before there is a process group
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    if rank == 0:
        print(plan)
        print(memory)
    mesh = plan.device_mesh("cpu")
    plan.apply(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    mine = rows.chunk(2)[mesh["shard"].get_local_rank()]
    for number in range(options.steps):
        loss = torch.tensor(step(model, optimizer, mine))
        dist.all_reduce(loss, op=dist.ReduceOp.SUM)
        expected = step(plain, plain_optimizer, rows)
        if rank == 0:
            print(f"step {number}: loss {loss / dist.get_world_size():.6f}, of the plain model {expected:.6f}")
        if rank == options.dies:
            os._exit(1)

    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder[0])
    loaded = Decoder()
    state = {"model": loaded.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    loaded.load_state_dict(state["model"])
    worst = max(
        (one - other).abs().max().item() for one, other in zip(loaded.parameters(), plain.parameters(), strict=True)
    )
    print(f"rank {rank}: largest difference of a weight {worst:.1e}")
    assert worst < 1e-10
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
