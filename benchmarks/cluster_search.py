"""Time the search for the best plan of Llama 3 405B on 10,240 devices, or of DeepSeek-V3 with divided experts.

python benchmarks/cluster_search.py [--small] [--mixture] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
import warnings

import torch
from cluster_mixtures import MODELS
from cluster_models import llama, mixture, token_loss

from modelsummary import Statistics
from modelsummary.cluster import Cluster, Recipe


def main() -> None:
    """Print how long the search takes, and what it finds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="search fewer plans")
    parser.add_argument("--mixture", action="store_true", help="search plans of DeepSeek-V3")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    begin = time.perf_counter()
    model = mixture(MODELS["DeepSeek-V3"]) if options.mixture else llama(126, 16384, 128, 8, 53248)
    stats = Statistics(model, torch.zeros(1, 8192, dtype=torch.long, device="meta"))
    print(f"summary: {time.perf_counter() - begin:.1f} s")
    cluster = Cluster.preset("DGX H100", nodes=1280)
    space = {"devices": [10240, 8192, 5120, 4096], "context": [1, 2, 4], "micro_batch": [1, 2, 4]}
    space |= {"checkpoint": [None, "every", 1, 2, 4]}
    if options.mixture:
        space = {
            "devices": [2048, 1024],
            "tensor": [1, 2, 4],
            "micro_batch": [1, 2],
            "checkpoint": [None, "every", 1, 2],
        }
    elif options.small:
        space |= {"devices": [8192], "context": [1], "micro_batch": [1], "checkpoint": [None, "every"]}
    profile = cProfile.Profile()
    begin, cpu = time.perf_counter(), time.process_time()
    if options.profile:
        profile.enable()
    plans = stats.plan(cluster, 20480, recipe=Recipe(loss=token_loss), **space)
    profile.disable()
    print(plans)
    took = time.perf_counter() - begin
    print(f"{plans.tried:,} candidates: {took:.1f} s, of which {time.process_time() - cpu:.1f} s of one core's time")
    if options.profile:
        pstats.Stats(profile).sort_stats("cumulative").print_stats(35)


if __name__ == "__main__":
    main()
