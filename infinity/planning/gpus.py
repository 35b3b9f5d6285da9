"""GPUs by name: what their makers say of them, and how much of that a training reaches. Pure."""

from __future__ import annotations

from dataclasses import dataclass

REACHED_COMPUTE = 0.4
"""Of the tensor cores' peak, in whole steps: what published trainings report lies between 0.3 and 0.5."""
REACHED_LINK = 0.85
"""Of a PCIe link's nominal rate, in large copies from page-locked memory: headers take the rest."""
REACHED_BANDWIDTH = 0.73
"""Of the memory's nominal bandwidth, in AdamW's kernel: measured on an H100 (bench/results/gpu-h100.json)."""
STEP_NBYTES = 26
"""Moved by AdamW's step of an element: its gradient, and the split master and two moments to and fro."""
OPERATIONS = 10
"""Times as long as that kernel torch's operations take, which do its work elsewhere: measured there."""
USE_S = 150e-6
"""In which Python fetches, attaches and releases a unit, about: see infinity.bench.engine.overhead."""
LAUNCH_S = 50e-6
"""In which torch launches the kernels of one use of a unit, about: some five of 10 µs each."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU."""

    title: str
    memory_nbytes: int
    peak: float
    """Operations per second in bf16, dense, with sums in fp32."""
    link: float
    """Bytes per second of its link to the host, each way."""
    bandwidth: float
    """Bytes per second of its memory."""
    has_kernel: bool = True
    """Whether AdamW's step there is one kernel."""

    @property
    def update(self) -> float:
        """Elements of records that live there that AdamW steps in a second."""
        in_one = REACHED_BANDWIDTH * self.bandwidth / STEP_NBYTES
        return in_one if self.has_kernel else in_one / OPERATIONS

    @property
    def compute(self) -> float:
        """Operations per second that a training reaches."""
        return REACHED_COMPUTE * self.peak

    @property
    def reached_link(self) -> float:
        """Bytes per second that copies reach, each way."""
        return REACHED_LINK * self.link


_PCIE_4, _PCIE_5 = 32e9, 64e9
"""Of 16 lanes, each way; makers name both ways together, 64 and 128 GB/s."""

GPUS = {
    # NVIDIA H200 Tensor Core GPU datasheet (SXM): 141 GB, 4.8 TB/s, 1,979 TFLOPS with sparsity, PCIe Gen5
    "h200": Gpu("H200 SXM", 141 * 10**9, 989.5e12, _PCIE_5, 4.8e12),
    # NVIDIA H100 Tensor Core GPU datasheet (SXM): 80 GB, 3.35 TB/s, 1,979 TFLOPS with sparsity, PCIe Gen5
    "h100": Gpu("H100 SXM", 80 * 10**9, 989.5e12, _PCIE_5, 3.35e12),
    # NVIDIA A100 Tensor Core GPU datasheet (80GB SXM): 2,039 GB/s, 312 TFLOPS dense, PCIe Gen4 64 GB/s
    "a100-80": Gpu("A100 80GB SXM", 80 * 10**9, 312e12, _PCIE_4, 2.039e12),
    # NVIDIA L40S datasheet: 48 GB, 864 GB/s, 733 TFLOPS with sparsity, PCIe Gen4 x16 64 GB/s
    "l40s": Gpu("L40S", 48 * 10**9, 362e12, _PCIE_4, 0.864e12),
    # NVIDIA Ada GPU architecture whitepaper: 24 GB, 1,008 GB/s, 165.2 TFLOPS with sums in fp32, PCIe Gen4 x16
    "rtx4090": Gpu("GeForce RTX 4090", 24 * 10**9, 165.2e12, _PCIE_4, 1.008e12),
    # NVIDIA Ampere GA102 GPU architecture whitepaper: 24 GB, 936 GB/s, 71 TFLOPS with sums in fp32, Gen4 x16
    "rtx3090": Gpu("GeForce RTX 3090", 24 * 10**9, 71e12, _PCIE_4, 0.936e12),
    # AMD Instinct MI300X datasheet: 192 GB, 5.3 TB/s, 1,307.4 TFLOPS dense, PCIe Gen5 x16
    "mi300x": Gpu("Instinct MI300X", 192 * 10**9, 1307.4e12, _PCIE_5, 5.3e12, has_kernel=False),
}
"""By the name of `infinity plan --gpu`."""
