"""Accelerators known by name: data sheet figures, and the speed that matrix products reach.

Peaks are dense, in 10^12 operations per second at the boost clock of the data sheet. The float32 peak holds for
vector units: PyTorch uses TF32 for products only if asked to. The half-precision peak of GeForce cards holds for
float32 accumulation, which PyTorch uses. Bandwidth is in 10^12 bytes per second, and the interconnect in 10^9 bytes per
second, both directions together.

Memory is in 10^9 bytes, as a data sheet has it, although most data sheets mean GiB, of which a device keeps some for
itself. ``usable_gib`` is what torch sees instead: ``total_memory`` of ``torch.cuda.get_device_properties``, or "total
capacity" in a message of CUDA or HIP being out of memory, the least of several that public repositories show. The
context of CUDA, some 0.5 GiB, still comes off. Devices without it count their data sheet's 10^9 bytes.

``achievable`` is the highest speed that a search over sizes of bfloat16 products reached, in 10^12 operations per
second, from the table of Maximum Achievable Matmul FLOPS of Stas Bekman's "Machine Learning Engineering Open Book"
(2025, https://github.com/stas00/ml-engineering/tree/master/compute/accelerator).
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["TABLE", "DeviceFigures"]

_Peaks = dict[tuple[str, ...], float]


@dataclass(frozen=True)
class DeviceFigures:
    """Data sheet figures of an accelerator, in the units of this module.

    Attributes:
        teraflops: dtypes (and ``"tf32"``) -> dense peak.
        bandwidth: bandwidth of the memory.
        memory: size of the memory.
        usable_gib: memory that torch sees, in GiB; None if it was not reported.
        interconnect: bandwidth to other accelerators of the node.
        units: streaming multiprocessors, compute units or tensor cores that share the work.
        cache_mb: the part of the last level of the cache that serves one unit, in 10^6 bytes: half of it on an A100,
            whose L2 has two partitions for the units next to them (NVIDIA A100 architecture whitepaper, 2020).
        watts: power of the board; None if it is not known. Vector units slow down on a board with little power.
        generation: architecture; a device without a fit of its own uses the fit of its generation.
        source: document that the figures are from.
        achievable: highest speed of bfloat16 products; None if none was published.
    """

    teraflops: _Peaks = field(repr=False)
    bandwidth: float
    memory: float
    usable_gib: float | None
    interconnect: float
    units: int
    cache_mb: float
    watts: int | None
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

# Peaks; bandwidth, memory, usable memory, interconnect, units, cache, watts, generation, source, achievable.
TABLE: dict[str, DeviceFigures] = {
    "P100": _F(
        {_FLOAT16: 18.7, _FLOAT32: 9.3, _FLOAT64: 4.7},
        *(0.732, 16, 15.89, 32, 56, 4, 250, "pascal", "NVIDIA P100 data sheet, PCIe, 16 GB, 2016"),
    ),
    "P4": _F({_FLOAT32: 5.5, _INT8: 22}, 0.192, 8, None, 32, 20, 2, 75, "pascal", "NVIDIA P4 data sheet, 2016"),
    "V100": _F(
        {_FLOAT16: 125, _FLOAT32: 15.7, _FLOAT64: 7.8},
        *(0.9, 32, 31.73, 300, 80, 6, 300, "volta", "NVIDIA V100 data sheet, SXM2, 2020"),
    ),
    "V100 PCIe": _F(
        {_FLOAT16: 112, _FLOAT32: 14, _FLOAT64: 7},
        *(0.9, 32, 31.73, 32, 80, 6, 250, "volta", "NVIDIA V100 data sheet, PCIe, 2020"),
    ),
    "T4": _F(
        {_FLOAT16: 65, _FLOAT32: 8.1, _INT8: 130},
        *(0.32, 16, 14.56, 32, 40, 4, 70, "turing", "NVIDIA T4 data sheet, 2019"),
    ),
    "A10": _F(
        {_HALF: 125, _TF32: 62.5, _FLOAT32: 31.2, _INT8: 250},
        *(0.6, 24, 22.05, 64, 72, 6, 150, "ampere", "NVIDIA A10 data sheet, 2021"),
    ),
    "A100 80GB": _F(_A100, 2.039, 80, 79.14, 600, 108, 20, 400, "ampere", "NVIDIA A100 data sheet, SXM4, 2021", 271.2),
    "A100 40GB": _F(_A100, 1.555, 40, 39.38, 600, 108, 20, 400, "ampere", "NVIDIA A100 data sheet, SXM4, 2021", 271.2),
    "A100 80GB PCIe": _F(
        _A100,
        *(1.935, 80, 79.14, 64, 108, 20, 300, "ampere", "NVIDIA A100 data sheet, PCIe, 2021", 252.9),
    ),
    "A100 40GB PCIe": _F(
        _A100,
        *(1.555, 40, 39.38, 64, 108, 20, 250, "ampere", "NVIDIA A100 data sheet, PCIe, 2021", 252.9),
    ),
    "RTX 3090": _F(
        {_HALF: 71, _TF32: 35.6, _FLOAT32: 35.6, _INT8: 284},
        *(0.936, 24, 23.68, 64, 82, 6, 350, "ampere", "NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A"),
    ),
    "RTX 3060": _F(
        {_HALF: 25.5, _TF32: 12.7, _FLOAT32: 12.7, _INT8: 102},
        *(0.36, 12, None, 64, 28, 3, 170, "ampere"),
        "NVIDIA GeForce RTX 3060 specifications, 2021; tensor cores as in the Ampere GA102 whitepaper",
    ),
    "RTX 3070": _F(
        {_HALF: 40.6, _TF32: 20.3, _FLOAT32: 20.3, _INT8: 162.6},
        *(0.448, 8, None, 64, 46, 4, 220, "ampere", "NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A"),
    ),
    "RTX 3080": _F(
        {_HALF: 59.5, _TF32: 29.8, _FLOAT32: 29.8, _INT8: 238},
        *(0.76, 10, None, 64, 68, 5, 320, "ampere", "NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A"),
    ),
    "A6000": _F(
        {_HALF: 154.8, _TF32: 77.4, _FLOAT32: 38.7, _INT8: 309.7},
        *(0.768, 48, None, 112.5, 84, 6, 300, "ampere", "NVIDIA RTX A6000 data sheet, 2021"),
    ),
    "A5500": _F(
        {_HALF: 136.4, _TF32: 68.2, _FLOAT32: 34.1, _INT8: 272.8},
        *(0.768, 24, None, 112.5, 80, 6, 230, "ampere", f"NVIDIA RTX A5500 data sheet, 2022{_SPARSE}"),
    ),
    "A5000": _F(
        {_HALF: 111.1, _TF32: 55.6, _FLOAT32: 27.8, _INT8: 222.2},
        *(0.768, 24, None, 112.5, 64, 6, 230, "ampere", f"NVIDIA RTX A5000 data sheet, 2021{_SPARSE}"),
    ),
    "A4000": _F(
        {_HALF: 76.7, _TF32: 38.3, _FLOAT32: 19.2, _INT8: 153.4},
        *(0.448, 16, None, 64, 48, 4, 140, "ampere", f"NVIDIA RTX A4000 data sheet, 2021{_SPARSE}"),
    ),
    "A2000": _F(
        {_HALF: 31.9, _TF32: 16, _FLOAT32: 8, _INT8: 63.9},
        *(0.288, 12, None, 64, 26, 3, 70, "ampere", f"NVIDIA RTX A2000 data sheet, 12 GB, 2021{_SPARSE}"),
    ),
    "A40": _F(
        {_HALF: 149.7, _TF32: 74.8, _FLOAT32: 37.4, _INT8: 299.3},
        *(0.696, 48, None, 112.5, 84, 6, 300, "ampere", "NVIDIA A40 data sheet, 2021"),
    ),
    "L4": _F(
        {_HALF: 121, _TF32: 60, _FLOAT32: 30.3, _INT8_FP8: 242.5},
        *(0.3, 24, 22.03, 64, 58, 48, 72, "ada", f"NVIDIA L4 data sheet, 2023{_SPARSE}"),
    ),
    "L40S": _F(
        {_HALF: 362, _TF32: 183, _FLOAT32: 91.6, _INT8_FP8: 733},
        *(0.864, 48, 44.39, 64, 142, 96, 350, "ada", "NVIDIA L40S data sheet, 2023"),
    ),
    "L40": _F(
        {_HALF: 181, _TF32: 90.5, _FLOAT32: 90.5, _INT8_FP8: 362},
        *(0.864, 48, None, 64, 142, 96, 300, "ada", "NVIDIA L40 data sheet, 2022"),
    ),
    "RTX 6000 Ada": _F(
        {_HALF: 364.2, _TF32: 182.1, _FLOAT32: 91.1, _INT8_FP8: 728.5},
        *(0.96, 48, None, 64, 142, 96, 300, "ada", f"NVIDIA RTX 6000 Ada data sheet, 2022{_SPARSE}"),
    ),
    "RTX 5000 Ada": _F(
        {_HALF: 261.1, _TF32: 130.6, _FLOAT32: 65.3, _INT8_FP8: 522.2},
        *(0.576, 32, None, 64, 100, 72, 250, "ada", f"NVIDIA RTX 5000 Ada data sheet, 2023{_SPARSE}"),
    ),
    "RTX 4000 Ada": _F(
        {_HALF: 106.9, _TF32: 53.5, _FLOAT32: 26.7, _INT8_FP8: 213.8},
        *(0.36, 20, None, 64, 48, 48, 130, "ada", f"NVIDIA RTX 4000 Ada data sheet, 2023{_SPARSE}"),
    ),
    "RTX 4070": _F(
        {_HALF: 58.3, _TF32: 29.1, _FLOAT32: 29.1, _INT8: 233.2, _FP8: 116.6},
        *(0.504, 12, None, 64, 46, 36, 200, "ada"),
        "NVIDIA GeForce RTX 4070 specifications, 2023; tensor cores as in the Ada whitepaper",
    ),
    "RTX 4080": _F(
        {_HALF: 97.5, _TF32: 48.7, _FLOAT32: 48.7, _INT8: 389.9, _FP8: 194.9},
        *(0.717, 16, None, 64, 76, 64, 320, "ada", "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    ),
    "RTX 4090": _F(
        {_HALF: 165.2, _TF32: 82.6, _FLOAT32: 82.6, _INT8: 660.6, _FP8: 330.3},
        *(1.008, 24, 23.64, 64, 128, 72, 450, "ada", "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    ),
    "H100": _F(_HOPPER, 3.35, 80, 79.18, 900, 132, 50, 700, "hopper", f"NVIDIA H100 data sheet, SXM5{_SPARSE}", 794.5),
    "H100 PCIe": _F(
        {_HALF: 756, _TF32: 378, _FLOAT32: 51, _FLOAT64: 51, _INT8_FP8: 1513},
        *(2, 80, 79.1, 600, 114, 50, 350, "hopper", f"NVIDIA H100 data sheet, PCIe{_SPARSE}"),
    ),
    "H200": _F(_HOPPER, 4.8, 141, 139.72, 900, 132, 50, 700, "hopper", f"NVIDIA H200 data sheet, SXM{_SPARSE}", 794.5),
    "H800": _F(
        {_HALF: 989.5, _TF32: 494.5, _FLOAT32: 67, _FLOAT64: 1, _INT8_FP8: 1979},
        *(3.35, 80, None, 400, 132, 50, 700, "hopper", f"NVIDIA H800 data sheet, SXM5, 2023{_SPARSE}"),
    ),
    "H800 PCIe": _F(
        {_HALF: 756, _TF32: 378, _FLOAT32: 51, _FLOAT64: 0.8, _INT8_FP8: 1513},
        *(2, 80, None, 400, 114, 50, 350, "hopper", f"NVIDIA H800 data sheet, PCIe, 2023{_SPARSE}"),
    ),
    "H20": _F(
        {_HALF: 148, _TF32: 74, _FLOAT32: 44, _FLOAT64: 1, _INT8_FP8: 296},
        *(4, 96, None, 900, 78, 60, 400, "hopper", "NVIDIA H20 data sheet, 2023"),
    ),
    "B200": _F(
        {_HALF: 2250, _TF32: 1125, _FLOAT32: 75, _FLOAT64: 37, _INT8_FP8: 4500},
        *(8, 180, 178.35, 1800, 148, 126, 1000, "blackwell"),
        *(f"NVIDIA HGX B200 data sheet, 2025, per GPU{_SPARSE}", 1745),
    ),
    "GB200": _F(
        {_HALF: 2500, _TF32: 1250, _FLOAT32: 80, _FLOAT64: 40, _INT8_FP8: 5000},
        *(8, 186, 184.31, 1800, 148, 126, 1200, "blackwell"),
        *(f"NVIDIA GB200 NVL72 data sheet, 2025, per GPU{_SPARSE}", 1822),
    ),
    "B300": _F(
        {_HALF: 2250, _TF32: 1125, _FLOAT32: 75, _FLOAT64: 1.2, _INT8: 150, _FP8: 4500},
        *(8, 270, 267.69, 1800, 148, 126, 1100, "blackwell"),
        *(f"NVIDIA HGX B300 data sheet, 2025, per GPU{_SPARSE}", 1769),
    ),
    "GB300": _F(
        {_HALF: 2500, _TF32: 1250, _FLOAT32: 80, _FLOAT64: 1.3, _INT8: 165, _FP8: 5000},
        *(8, 279, None, 1800, 148, 126, 1400, "blackwell", f"NVIDIA GB300 NVL72 data sheet, 2025, per GPU{_SPARSE}"),
    ),
    "RTX PRO 6000": _F(
        {_HALF: 503.8, _TF32: 251.9, _FLOAT32: 126, _INT8_FP8: 1007.6},
        *(1.792, 96, None, 128, 188, 128, 600, "rtx blackwell"),
        "NVIDIA RTX Blackwell PRO GPU architecture whitepaper, 2025; 600 W",
    ),
    "RTX PRO 6000 Max-Q": _F(
        {_HALF: 438.9, _TF32: 219.4, _FLOAT32: 109.7, _INT8_FP8: 877.7},
        *(1.792, 96, None, 128, 188, 128, 300, "rtx blackwell"),
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition data sheet, 2025",
    ),
    "RTX 5070": _F(
        {_HALF: 61.7, _TF32: 30.9, _FLOAT32: 30.9, _INT8: 246.9, _FP8: 123.5},
        *(0.672, 12, None, 128, 48, 48, 250, "rtx blackwell"),
        "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix",
    ),
    "RTX 5080": _F(
        {_HALF: 112.6, _TF32: 56.3, _FLOAT32: 56.3, _INT8: 450.2, _FP8: 225.1},
        *(0.96, 16, None, 128, 84, 64, 360, "rtx blackwell"),
        "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix",
    ),
    "RTX 5090": _F(
        {_HALF: 209.5, _TF32: 104.8, _FLOAT32: 104.8, _INT8: 838, _FP8: 419},
        *(1.792, 32, 31.34, 128, 170, 96, 575, "rtx blackwell"),
        "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A",
    ),
    "MI250": _F(
        {_HALF: 362.1, _FLOAT32: 45.3, _FLOAT64: 45.3, _INT8: 362.1},
        *(3.277, 128, 127.96, 800, 208, 16, 500, "cdna2"),
        "AMD Instinct MI250 data sheet, 2021; both dies, each a device of torch",
    ),
    "MI300X": _F(_CDNA3, 5.3, 192, 191.98, 896, 304, 256, 750, "cdna3", "AMD Instinct MI300X data sheet, 2023", 668.4),
    "MI325X": _F(_CDNA3, 6, 256, 255.98, 896, 304, 256, 1000, "cdna3", "AMD Instinct MI325X data sheet, 2024", 784.9),
    "MI350X": _F(
        {_HALF: 2306.9, _FLOAT32: 144.2, _FLOAT64: 72.1, _INT8_FP8: 4613.7},
        *(8, 288, None, 1075, 256, 256, 1000, "cdna4", "AMD Instinct MI350X data sheet, 2025"),
    ),
    "MI355X": _F(
        {_HALF: 2516.6, _FLOAT32: 157.3, _FLOAT64: 78.6, _INT8_FP8: 5033.2},
        *(8, 288, 287.98, 1075, 256, 256, 1400, "cdna4", "AMD Instinct MI355X data sheet, 2025", 1565),
    ),
    "TPU v5e": _F(
        {_BFLOAT16: 197, _INT8: 394},
        *(0.819, 16, None, 400, 4, 128, None, "tpu", "Google Cloud TPU v5e documentation"),
    ),
    "TPU v5p": _F(
        {_BFLOAT16: 459, _INT8: 918},
        *(2.765, 95, None, 1200, 8, 128, None, "tpu", "Google Cloud TPU v5p documentation"),
    ),
    "TPU v6e": _F(
        {_BFLOAT16: 918, _INT8: 1836},
        *(1.64, 32, None, 800, 2, 128, None, "tpu", "Google Cloud TPU v6e documentation"),
    ),
}
