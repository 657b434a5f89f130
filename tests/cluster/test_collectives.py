"""Clusters, and the time of collectives derived by hand."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest

from modelsummary import InputError
from modelsummary.cluster import Cluster
from modelsummary.cluster.collectives import Network, RankGroup, collective_fits
from modelsummary.cluster.protocols import seconds_of_protocols
from modelsummary.cluster.topology import PRESETS
from modelsummary.operators.collective_calls import OPERATIONS

IDEAL = {"link_latency": 0.0, "network_latency": 0.0, "link_efficiency": 1.0, "network_efficiency": 1.0}


@pytest.fixture
def network(monkeypatch):
    """A network without fixed costs: 100 GB/s inside nodes of 4, 10 GB/s between them for each device."""
    fits = {"link": {"base_us": 0.0, "loss": 0.0}, "network": {}}
    monkeypatch.setattr("modelsummary.cluster.collectives.collective_fits", lambda: fits)
    cluster = Cluster("A100", nodes=4, devices_per_node=4, link_bandwidth=100e9, network_bandwidth=10e9, **IDEAL)
    return Network(cluster)


def test_rings_inside_a_node(network):
    group = network.group(4)
    assert group == RankGroup(4, 4)
    assert network.seconds("all_reduce", 1e9, group) == pytest.approx(2 * 3 / 4 * 1e9 / 100e9)
    for operation in ("all_gather", "reduce_scatter"):
        assert network.seconds(operation, 1e9, group) == pytest.approx(3 / 4 * 1e9 / 100e9)
    assert network.seconds("all_reduce", 1e9, network.group(1)) == 0


def test_between_nodes(network):
    one_per_node = network.group(4, stride=4)
    assert one_per_node == RankGroup(4, 1)
    assert network.seconds("all_reduce", 1e9, one_per_node) == pytest.approx(2 * 3 / 4 * 1e9 / 10e9)
    # four ranks in a node use its four interfaces
    everything = network.group(16)
    assert everything == RankGroup(16, 4)
    assert network.seconds("all_gather", 1e9, everything) == pytest.approx(15 / 16 * 1e9 / 40e9)
    assert network.send(1e9, is_inside=True) == pytest.approx(1e9 / 100e9)
    assert network.send(1e9, is_inside=False) == pytest.approx(1e9 / 10e9)


def test_all_to_all_waits_for_the_slower_network(network):
    # each rank keeps 1/16 of its data, sends 3/16 inside its node and 12/16 to others
    assert network.seconds("all_to_all", 1e9, network.group(16)) == pytest.approx(12 / 16 * 1e9 / 10e9)
    # the fifth rank is alone in its node and sends 4/5 to others
    assert network.seconds("all_to_all", 1e9, network.group(5)) == pytest.approx(4 / 5 * 1e9 / 10e9)


def test_latency_decides_for_small_messages():
    network = Network(Cluster("A100", nodes=64))
    small, large = (network.seconds("all_reduce", nbytes, network.group(64, stride=8)) for nbytes in (1e3, 1e9))
    assert 20e-6 < small < 1e-3 < large
    for operation in OPERATIONS:
        times = [network.seconds(operation, 2.0**power, network.group(512)) for power in range(10, 31)]
        assert times == sorted(times)


@pytest.mark.parametrize(
    ("link", "operation", "nbytes", "nodes", "seconds"),
    [
        (300e9, "all_reduce", 8, 1, (6.6 + 14 * 0.6) * 1e-6),  # LL, ring
        (32e9, "all_reduce", 8, 1, (6.6 + 14 * 1.0) * 1e-6),  # LL, ring, over PCIe
        (300e9, "all_gather", 8, 1, (6.6 + 7 * 0.6) * 1e-6),  # LL, ring
        (300e9, "all_reduce", 8, 4, (6.8 + 2 * (7 * 0.6 + 2 * 5.0)) * 1e-6),  # LL, tree over four nodes
        # LL128, tree: two passes at 0.92 * 7 / 9 of the links' bandwidth, as that is less than what LL128 reaches
        (300e9, "all_reduce", 1.5e6, 1, (14 + 14 * 1.25) * 1e-6 + 2 * 1.5e6 / (300e9 * 0.92 * 7 / 9)),
        # LL128, ring: at the 0.8 of the links' bandwidth that it reaches; NCCL's own estimate has 0.92
        (300e9, "all_reduce", 2**23, 1, (14 + 14 * 1.9) * 1e-6 + 14 / 8 * 2**23 / (300e9 * 0.8)),
    ],
)
def test_small_messages_take_protocols_with_low_latency(monkeypatch, link, operation, nbytes, nodes, seconds):
    fits = {"link": {"base_us": 35.0, "step_us": 3.0, "loss": 0.0, "efficiency": 1.0, "ll128": 0.8}}
    fits["network"] = {"step_us": 14.0, "efficiency": 1.0}
    monkeypatch.setattr("modelsummary.cluster.collectives.collective_fits", lambda: fits)
    cluster = Cluster("A100", nodes=nodes, link_bandwidth=link)
    found = Network(cluster).seconds(operation, nbytes, RankGroup(8 * nodes, 8))
    assert found == pytest.approx(seconds, rel=1e-3)
    own = Network(Cluster("A100", nodes=nodes, link_bandwidth=link, link_latency=3e-6, network_latency=14e-6))
    assert own.seconds(operation, nbytes, RankGroup(8 * nodes, 8)) > found  # latencies of the user replace protocols


@pytest.fixture
def switched(monkeypatch):
    """A network of H100 with links of 400 GB/s, 0.8 of it to the switch, and other costs that are round numbers."""
    fits = {"link": {"base_us": 30.0, "step_us": 5.0, "loss": 0.0, "efficiency": 1.0, "ll128": 0.7}}
    fits["network"] = {"step_us": 14.0, "efficiency": 1.0}
    fits["switch"] = {"base_us": 20.0, "fill": 1.0, "sync_us": 4.0, "share": 0.8}
    monkeypatch.setattr("modelsummary.cluster.collectives.collective_fits", lambda: fits)
    return Network(Cluster("H100", nodes=2, link_bandwidth=400e9))


def test_switches_reduce_for_large_messages(switched):
    # each link carries 9/8 of the data at 0.8 * 400 GB/s; 8 * 16 chunks of 128 KiB fill the pipeline
    large = 20e-6 + 9 / 8 * (2**30 + 128 * 2**17) / 320e9
    assert switched.seconds("all_reduce", 2**30, RankGroup(8, 8)) == pytest.approx(large)
    # 4 MiB in chunks of 16 KiB are 2 steps of 128 chunks, 1.75 more than with chunks of 128 KiB
    small = 20e-6 + 9 / 8 * (2**22 + 128 * 2**14) / 320e9 + 1.75 * 4e-6
    assert switched.seconds("all_reduce", 2**22, RankGroup(8, 8)) == pytest.approx(small)
    # 6 ranks: 7/6 of the data
    six = 20e-6 + 7 / 6 * (2**30 + 96 * 2**17) / 320e9
    assert switched.seconds("all_reduce", 2**30, RankGroup(6, 6)) == pytest.approx(six)


def test_rings_where_the_tuner_prefers_them(switched):
    # LL takes 6.6 + 14 * 0.6 us and 14/8 of the data at 141 GB/s; the tuner expects 25 us and more of the switch
    assert switched.seconds("all_reduce", 2**20, RankGroup(8, 8)) == pytest.approx(15e-6 + 14 / 8 * 2**20 / 141e9)
    # the tuner expects 5/6 * 4/6 of the links for four ranks, less than the 4/6 of a ring's bandwidth; rings then take
    # 30 + 6 * 5 us and 6/4 of the data
    assert switched.seconds("all_reduce", 2**30, RankGroup(4, 4)) == pytest.approx(60e-6 + 6 / 4 * 2**30 / 400e9)
    # two ranks have no use of a switch, gathers take rings, and nodes have a switch each
    assert switched.seconds("all_reduce", 2**30, RankGroup(2, 2)) == pytest.approx(40e-6 + 2**30 / 400e9)
    assert switched.seconds("all_gather", 2**30, RankGroup(8, 8)) == pytest.approx(65e-6 + 7 / 8 * 2**30 / 400e9)
    off = Network(Cluster("H100", nodes=2, link_bandwidth=400e9, nvlink_sharp=False))
    for nbytes in (2**20, 2**30):
        both = [each.seconds("all_reduce", nbytes, RankGroup(16, 8)) for each in (switched, off)]
        assert both[0] == both[1]
    assert off.seconds("all_reduce", 2**30, RankGroup(8, 8)) == pytest.approx(100e-6 + 14 / 8 * 2**30 / 400e9)


def test_large_all_reduces_of_hopper_and_blackwell():
    """Bus bandwidths that NVIDIA and users publish for eight H100 and eight B200: 480 and 830 GB/s."""
    for device, published in (("H100", 480e9), ("B200", 830e9)):
        seconds = Network(Cluster(device)).seconds("all_reduce", 2**33, RankGroup(8, 8))
        assert 14 / 8 * 2**33 / seconds == pytest.approx(published, rel=0.03)


def test_latencies_of_the_user_leave_the_switch(switched):
    # two messages after the base of 30 us, to the switch and back; rings take 30 + 14 * 3 us and 14/8 of the data
    own = Network(Cluster("H100", nodes=2, link_bandwidth=400e9, link_latency=3e-6))
    large = 36e-6 + 9 / 8 * (2**30 + 128 * 2**17) / 320e9
    assert own.seconds("all_reduce", 2**30, RankGroup(8, 8)) == pytest.approx(large)
    other = Network(Cluster("H100", nodes=2, link_bandwidth=400e9, network_latency=14e-6))
    both = [each.seconds("all_reduce", 2**30, RankGroup(8, 8)) for each in (switched, other)]
    assert both[0] == pytest.approx(both[1], rel=0.01)


def test_pcie_has_no_switch_that_reduces():
    assert not Cluster("H100", link_bandwidth=32e9).reduces_in_switch
    assert Cluster("H100", link_bandwidth=200e9).reduces_in_switch


@pytest.mark.parametrize(
    ("device", "reduces"),
    [("A100", False), ("H100", True), ("H100 PCIe", False), ("H200", True), ("B300", True), ("RTX 4090", False)],
)
def test_which_switches_reduce(device, reduces):
    assert Cluster(device).reduces_in_switch is reduces
    assert Cluster(device, nvlink_sharp=not reduces).reduces_in_switch is not reduces


@pytest.mark.parametrize("preset", ["DGX A100", "GB200 NVL72", "A100 PCIe", "RTX 4090"])
def test_time_grows_with_bytes_without_jumps(preset):
    network = Network(Cluster.preset(preset, nodes=4))
    for size, stride in ((2, 1), (8, 1), (16, 1), (4, network.cluster.devices_per_node)):
        for operation in OPERATIONS:
            group = network.group(size, stride)
            times = [network.seconds(operation, 1.25**power, group) for power in range(100)]  # 1 B to 4 GB
            assert all(a <= b for a, b in pairwise(times))
            # but where NCCL changes to LL128 or Simple, which are slower than it estimates
            assert sum(b >= 1.26 * a for a, b in pairwise(times)) <= 2
            assert all(b < 30e-6 + 1.26 * a for a, b in pairwise(times))


def test_two_ranks_take_simple_where_nccl_prefers_it():
    """NCCL estimates 8.4 + 2 * 3.4 us for Simple, 14 + 2 * 1.9 us for LL128; two A100 took 69.0 us for 5 MiB."""
    network, pair = Network(Cluster("A100")), RankGroup(2, 2)
    assert network.seconds("all_reduce", 5 * 2**20, pair) == pytest.approx(69.0e-6, rel=0.03)
    links = network._links(pair)
    bandwidth = links.bandwidth
    switch = (8.4 + 2 * 3.4 - 6.6 - 2 * 0.6) * 1e-6 / (4 / bandwidth - 1 / bandwidth)  # LL has a quarter of it
    assert seconds_of_protocols("all_reduce", 0.99 * switch, links) < inf
    assert seconds_of_protocols("all_reduce", 1.01 * switch, links) == inf


@pytest.mark.parametrize("preset", ["DGX A100", "GB200 NVL72", "A100 PCIe"])
@pytest.mark.parametrize("protocols", [True, False])
def test_time_grows_with_ranks(preset, protocols):
    """Full nodes, for one protocol; a node that is not full is as slow as a full one. Switches do not reduce."""
    own = {} if protocols else {"link_latency": 3e-6, "network_latency": 14e-6}
    network = Network(Cluster.preset(preset, nodes=16, nvlink_sharp=False, **own))
    per_node = network.cluster.devices_per_node
    for operation in ("all_reduce", "all_gather"):
        for nbytes in (1e3, 1e9):
            times = [network.seconds(operation, nbytes, network.group(n)) for n in range(2, 16 * per_node + 1)]
            assert all(a <= b * (1 + 1e-9) for a, b in pairwise(times))
    uneven = network.seconds("all_to_all", 1e9, network.group(per_node + 1))
    assert uneven > network.seconds("all_to_all", 1e9, network.group(per_node))


def test_small_messages_to_one_rank_take_ll():
    network = Network(Cluster("A100", nodes=2))
    assert network.send(8, is_inside=True) == pytest.approx((6.6 + 0.6) * 1e-6, rel=1e-3)
    assert network.send(8, is_inside=False) == pytest.approx((6.6 + 2.7) * 1e-6, rel=1e-3)
    fits = collective_fits()
    large = fits["link"]["base_us"] + fits["network"]["step_us"]
    assert network.send(2**20, is_inside=False) == pytest.approx(large * 1e-6 + 2**20 / (0.9 * 25e9))


def test_fewer_interfaces_are_slower():
    few, many = (
        Network(Cluster("A100", nodes=4, interfaces_per_node=each)).seconds("all_reduce", 1e9, RankGroup(32, 8))
        for each in (2, 8)
    )
    assert few > 2 * many


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    cluster = Cluster.preset(name, nodes=2)
    assert cluster.devices == 2 * cluster.devices_per_node
    assert cluster.with_nodes(3).nodes == 3
    assert cluster.memory_bytes == cluster.device.memory_bytes


def test_toml(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text('preset = "DGX A100"\nnodes = 3\ninterfaces_per_node = 4\n')
    assert Cluster.from_toml(path) == Cluster.preset("DGX A100", nodes=3, interfaces_per_node=4)
    path.write_text('preset = "DGX A100"\nname = "ours"\n')
    assert Cluster.from_toml(path).name == "ours"
    own = "[device]\nname = 'own'\nbandwidth = 1e12\nmemory_bytes = 10_000\npeak_flops = { bfloat16 = 1e14 }\n"
    path.write_text(f"link_bandwidth = 1e10\n{own}")
    assert Cluster.from_toml(path).device.name == "own"
    for text, message in (
        ("nodes = ", "is not a readable TOML file"),
        ("nodes = 2", "a cluster needs a device"),
        ("device = 'A100'\nnode = 2", "unknown option 'node' of a cluster; expected .*; did you mean 'nodes'"),
        ("[device]\nnam = 'A100'", "device: .*nam"),
        ("preset = 'DGX A100'\nname = 3", "name must be a string, got 3"),
        ("[device]\npeak_flops = 1e14", "peak_flops must be a table of dtypes and FLOP/s, such as .* got 1"),
        (
            "[device]\npeak_flops = { float17 = 1e14 }",
            "peak_flops must be a torch.dtype or 'tf32', or its name such as .*, got 'float17'; did you mean 'float16'",
        ),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            Cluster.from_toml(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "A1000"}, "no accelerator 'A1000'"),
        ({"device": 3}, "device must be a DeviceSpec or the name of an accelerator, got 3"),
        ({"nodes": 0}, "nodes must be an integer >= 1, got 0"),
        ({"network_bandwidth": -1}, "network_bandwidth .* must be a number > 0, got -1"),
        ({"link_latency": "1"}, "link_latency must be a number >= 0 or None, got '1'"),
        ({"link_efficiency": 0}, "link_efficiency must be a number > 0 and <= 1, or None, got 0"),
        ({"link_efficiency": True}, "link_efficiency must be a number > 0 and <= 1, or None, got True"),
        ({"link_latency": True}, "link_latency must be a number >= 0 or None, got True"),
        ({"network_latency": float("inf")}, "network_latency must be a number >= 0 or None, got inf"),
        ({"network_bandwidth": float("nan")}, "network_bandwidth .* must be a number > 0, got nan"),
        ({"link_bandwidth": False}, "link_bandwidth .* must be a number > 0, got False"),
        ({"memory_bytes": True}, "memory_bytes must be an integer >= 1 or text such as .*, got True"),
        ({"interfaces_per_node": 0.5}, "interfaces_per_node must be an integer >= 1, got 0.5"),
        ({"interfaces_per_node": -1}, "interfaces_per_node .* must be a number > 0, got -1"),
        ({"name": 3}, "name must be a string, got 3"),
        ({"nvlink_sharp": 1}, "nvlink_sharp must be True, False or None, got 1"),
    ],
)
def test_bad_clusters(arguments, message):
    with pytest.raises(InputError, match=message):
        Cluster(**{"device": "A100", **arguments})


def test_unknown_names():
    with pytest.raises(InputError, match=r"name must be one of 'DGX A100', .*, got \['DGX A100'\]"):
        Cluster.preset(["DGX A100"])
    with pytest.raises(InputError, match="path='3' is not a readable TOML file"):
        Cluster.from_toml(3)
    with pytest.raises(InputError, match=r"name must be one of 'DGX A100', .*, got 'DGX A10'; did you mean 'DGX A100'"):
        Cluster.preset("DGX A10")
    with pytest.raises(InputError, match=r"operation must be one of 'all_reduce', .* got 'send'"):
        Network(Cluster("A100")).seconds("send", 1, RankGroup(2, 2))
