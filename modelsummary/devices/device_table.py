"""Accelerators known by name: data sheet figures, and the speed that matrix products reach.

Peaks are dense, in 10^12 operations per second at the boost clock of the data sheet. The float32 peak holds for
vector units: PyTorch uses TF32 for products only if asked to. The half-precision peak of GeForce cards holds for
float32 accumulation, which PyTorch uses. Bandwidth is in 10^12 bytes per second, and the interconnect in 10^9 bytes per
second, both directions together.

Memory is in 10^9 bytes, as a data sheet has it, although most data sheets mean GiB, of which a device keeps some for
itself. ``USABLE_GIB`` is what torch sees instead: ``total_memory`` of ``torch.cuda.get_device_properties``, or "total
capacity" in a message of CUDA or HIP being out of memory, the least of several that public repositories show. The
context of CUDA, some 0.5 GiB, still comes off. Devices that are not listed count their data sheet's 10^9 bytes.

``achievable`` is the highest speed that a search over sizes of bfloat16 products reached, in 10^12 operations per
second, from the table of Maximum Achievable Matmul FLOPS of Stas Bekman's "Machine Learning Engineering Open Book"
(2025, https://github.com/stas00/ml-engineering/tree/master/compute/accelerator).
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["TABLE", "USABLE_GIB", "WATTS", "DeviceFigures"]

_Peaks = dict[tuple[str, ...], float]


@dataclass(frozen=True)
class DeviceFigures:
    """Data sheet figures of an accelerator, in the units of this module.

    Attributes:
        teraflops: dtypes (and ``"tf32"``) -> dense peak.
        bandwidth: bandwidth of the memory.
        memory: size of the memory.
        interconnect: bandwidth to other accelerators of the node.
        units: streaming multiprocessors, compute units or tensor cores that share the work.
        cache_mb: size of the last level of the cache, in 10^6 bytes.
        generation: architecture; a device without a fit of its own uses the fit of its generation.
        source: document that the figures are from.
        achievable: highest speed of bfloat16 products; None if none was published.
    """

    teraflops: _Peaks = field(repr=False)
    bandwidth: float
    memory: float
    interconnect: float
    units: int
    cache_mb: float
    generation: str
    source: str
    achievable: float | None = None


_FLOAT32, _HALF, _FLOAT64, _INT8 = ("float32",), ("float16", "bfloat16"), ("float64",), ("int8",)
_TF32, _FLOAT16, _BFLOAT16 = ("tf32",), ("float16",), ("bfloat16",)
_FP8 = ("float8_e4m3fn", "float8_e5m2")
_INT8_FP8 = ("int8", *_FP8)
_A100: _Peaks = {_HALF: 312, _TF32: 156, _FLOAT32: 19.5, _FLOAT64: 19.5, _INT8: 624}
_HOPPER: _Peaks = {_HALF: 989.5, _TF32: 494.5, _FLOAT32: 67, _FLOAT64: 67, _INT8_FP8: 1979}
_CDNA3: _Peaks = {_HALF: 1307.4, _TF32: 653.7, _FLOAT32: 163.4, _FLOAT64: 163.4, _INT8_FP8: 2614.9}
_SPARSE = "; half of the figures with sparsity"
_F = DeviceFigures

TABLE: dict[str, DeviceFigures] = {
    "P100": _F(
        {_FLOAT16: 18.7, _FLOAT32: 9.3, _FLOAT64: 4.7},
        *(0.732, 16, 32, 56, 4, "pascal", "NVIDIA P100 data sheet, PCIe, 16 GB, 2016"),
    ),
    "P4": _F({_FLOAT32: 5.5, _INT8: 22}, 0.192, 8, 32, 20, 2, "pascal", "NVIDIA P4 data sheet, 2016"),
    "V100": _F(
        {_FLOAT16: 125, _FLOAT32: 15.7, _FLOAT64: 7.8},
        *(0.9, 32, 300, 80, 6, "volta", "NVIDIA V100 data sheet, SXM2, 2020"),
    ),
    "V100 PCIe": _F(
        {_FLOAT16: 112, _FLOAT32: 14, _FLOAT64: 7},
        *(0.9, 32, 32, 80, 6, "volta", "NVIDIA V100 data sheet, PCIe, 2020"),
    ),
    "T4": _F(
        {_FLOAT16: 65, _FLOAT32: 8.1, _INT8: 130},
        *(0.32, 16, 32, 40, 4, "turing", "NVIDIA T4 data sheet, 2019"),
    ),
    "A10": _F(
        {_HALF: 125, _TF32: 62.5, _FLOAT32: 31.2, _INT8: 250},
        *(0.6, 24, 64, 72, 6, "ampere", "NVIDIA A10 data sheet, 2021"),
    ),
    "A100 80GB": _F(_A100, 2.039, 80, 600, 108, 40, "ampere", "NVIDIA A100 data sheet, SXM4, 2021", 271.2),
    "A100 40GB": _F(_A100, 1.555, 40, 600, 108, 40, "ampere", "NVIDIA A100 data sheet, SXM4, 2021", 271.2),
    "A100 80GB PCIe": _F(_A100, 1.935, 80, 64, 108, 40, "ampere", "NVIDIA A100 data sheet, PCIe, 2021", 252.9),
    "A100 40GB PCIe": _F(_A100, 1.555, 40, 64, 108, 40, "ampere", "NVIDIA A100 data sheet, PCIe, 2021", 252.9),
    "RTX 3090": _F(
        {_HALF: 71, _TF32: 35.6, _FLOAT32: 35.6, _INT8: 284},
        *(0.936, 24, 64, 82, 6, "ampere", "NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A"),
    ),
    "L4": _F(
        {_HALF: 121, _TF32: 60, _FLOAT32: 30.3, _INT8_FP8: 242.5},
        *(0.3, 24, 64, 58, 48, "ada", f"NVIDIA L4 data sheet, 2023{_SPARSE}"),
    ),
    "L40S": _F(
        {_HALF: 362, _TF32: 183, _FLOAT32: 91.6, _INT8_FP8: 733},
        *(0.864, 48, 64, 142, 96, "ada", "NVIDIA L40S data sheet, 2023"),
    ),
    "RTX 4090": _F(
        {_HALF: 165.2, _TF32: 82.6, _FLOAT32: 82.6, _INT8: 660.6, _FP8: 330.3},
        *(1.008, 24, 64, 128, 72, "ada", "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    ),
    "H100": _F(_HOPPER, 3.35, 80, 900, 132, 50, "hopper", f"NVIDIA H100 data sheet, SXM5{_SPARSE}", 794.5),
    "H100 PCIe": _F(
        {_HALF: 756, _TF32: 378, _FLOAT32: 51, _FLOAT64: 51, _INT8_FP8: 1513},
        *(2.0, 80, 600, 114, 50, "hopper", f"NVIDIA H100 data sheet, PCIe{_SPARSE}"),
    ),
    "H200": _F(_HOPPER, 4.8, 141, 900, 132, 50, "hopper", f"NVIDIA H200 data sheet, SXM{_SPARSE}", 794.5),
    "B200": _F(
        {_HALF: 2250, _TF32: 1125, _FLOAT32: 75, _FLOAT64: 37, _INT8_FP8: 4500},
        *(8.0, 180, 1800, 148, 126, "blackwell", f"NVIDIA HGX B200 data sheet, 2025, per GPU{_SPARSE}", 1745),
    ),
    "GB200": _F(
        {_HALF: 2500, _TF32: 1250, _FLOAT32: 80, _FLOAT64: 40, _INT8_FP8: 5000},
        *(8.0, 186, 1800, 148, 126, "blackwell", f"NVIDIA GB200 NVL72 data sheet, 2025, per GPU{_SPARSE}", 1822),
    ),
    "B300": _F(
        {_HALF: 2250, _TF32: 1125, _FLOAT32: 75, _FLOAT64: 1.2, _INT8: 150, _FP8: 4500},
        *(8.0, 270, 1800, 148, 126, "blackwell", f"NVIDIA HGX B300 data sheet, 2025, per GPU{_SPARSE}", 1769),
    ),
    "GB300": _F(
        {_HALF: 2500, _TF32: 1250, _FLOAT32: 80, _FLOAT64: 1.3, _INT8: 165, _FP8: 5000},
        *(8.0, 279, 1800, 148, 126, "blackwell", f"NVIDIA GB300 NVL72 data sheet, 2025, per GPU{_SPARSE}"),
    ),
    "RTX 5090": _F(
        {_HALF: 209.5, _TF32: 104.8, _FLOAT32: 104.8, _INT8: 838, _FP8: 419},
        *(1.792, 32, 128, 170, 96, "blackwell", "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A"),
    ),
    "MI250": _F(
        {_HALF: 362.1, _FLOAT32: 45.3, _FLOAT64: 45.3, _INT8: 362.1},
        *(3.277, 128, 800, 208, 16, "cdna2", "AMD Instinct MI250 data sheet, 2021; both dies, each a device of torch"),
    ),
    "MI300X": _F(_CDNA3, 5.3, 192, 896, 304, 256, "cdna3", "AMD Instinct MI300X data sheet, 2023", 668.4),
    "MI325X": _F(_CDNA3, 6.0, 256, 896, 304, 256, "cdna3", "AMD Instinct MI325X data sheet, 2024", 784.9),
    "MI355X": _F(
        {_HALF: 2516.6, _FLOAT32: 157.3, _FLOAT64: 78.6, _INT8_FP8: 5033.2},
        *(8.0, 288, 1075, 256, 256, "cdna4", "AMD Instinct MI355X data sheet, 2025", 1565),
    ),
    "TPU v5e": _F({_BFLOAT16: 197, _INT8: 394}, 0.819, 16, 400, 4, 128, "tpu", "Google Cloud TPU v5e documentation"),
    "TPU v5p": _F({_BFLOAT16: 459, _INT8: 918}, 2.765, 95, 1200, 8, 128, "tpu", "Google Cloud TPU v5p documentation"),
    "TPU v6e": _F({_BFLOAT16: 918, _INT8: 1836}, 1.64, 32, 800, 2, 128, "tpu", "Google Cloud TPU v6e documentation"),
}

USABLE_GIB: dict[str, float] = {
    "P100": 15.89,
    "V100": 31.73,
    "V100 PCIe": 31.73,
    "T4": 14.56,
    "A10": 22.05,
    "A100 80GB": 79.14,
    "A100 40GB": 39.38,
    "A100 80GB PCIe": 79.14,
    "A100 40GB PCIe": 39.38,
    "RTX 3090": 23.68,
    "L4": 22.03,
    "L40S": 44.39,
    "RTX 4090": 23.64,
    "H100": 79.18,
    "H100 PCIe": 79.1,
    "H200": 139.72,
    "B200": 178.35,
    "GB200": 184.31,
    "B300": 267.69,
    "RTX 5090": 31.34,
    "MI250": 127.96,
    "MI300X": 191.98,
    "MI325X": 255.98,
    "MI355X": 287.98,
}

# Board power in watts, from the data sheets. Vector units slow down on a board with little power for its peak.
WATTS: dict[str, int] = {
    "P100": 250,
    "P4": 75,
    "V100": 300,
    "V100 PCIe": 250,
    "T4": 70,
    "A10": 150,
    "A100 80GB": 400,
    "A100 40GB": 400,
    "A100 80GB PCIe": 300,
    "A100 40GB PCIe": 250,
    "RTX 3090": 350,
    "L4": 72,
    "L40S": 350,
    "RTX 4090": 450,
    "H100": 700,
    "H100 PCIe": 350,
    "H200": 700,
    "B200": 1000,
    "GB200": 1200,
    "B300": 1100,
    "GB300": 1400,
    "RTX 5090": 575,
    "MI250": 500,
    "MI300X": 750,
    "MI325X": 1000,
    "MI355X": 1400,
}
