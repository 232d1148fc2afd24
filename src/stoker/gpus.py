"""GPU specifications: the one table of what cards can do at best, from the makers' sheets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """One model's limits. Tensor rates are dense, in TFLOP/s; `pcie_gb_s` is what one pinned copy reaches."""

    name: str
    bf16: float
    tf32: float
    fp32: float
    memory_gb: float
    power_w: float
    boost_mhz: float
    pcie_gb_s: float


def _peaks(name: str, *numbers: float) -> Peaks:
    bf16, tf32, fp32, memory_gb, power_w, boost_mhz, pcie_gb_s = numbers
    return Peaks(
        name=name, bf16=bf16, tf32=tf32, fp32=fp32, memory_gb=memory_gb,
        power_w=power_w, boost_mhz=boost_mhz, pcie_gb_s=pcie_gb_s,
    )  # fmt: skip


# The first whose every word occurs in the reported name is taken: special models stand before general ones.
# Cards without bf16 (V100, T4) have their fp16 rate there. 55 GB/s pinned was measured on PCIe 5, 25 and 12
# are what PCIe 4 and 3 reach.
PEAKS = (
    #       name              bf16   tf32  fp32  GB   W     MHz   GB/s
    _peaks("GB300", 2500, 1250, 80, 279, 1400, 1920, 55),
    _peaks("GB200", 2500, 1250, 80, 186, 1200, 1965, 55),
    _peaks("B300", 2250, 1125, 75, 270, 1100, 1920, 55),
    _peaks("B200", 2250, 1125, 75, 180, 1000, 1965, 55),
    _peaks("H200 NVL", 835, 417, 60, 141, 600, 1785, 55),
    _peaks("H200", 989, 494, 67, 141, 700, 1980, 55),
    _peaks("GH200", 989, 494, 67, 96, 700, 1980, 55),
    _peaks("H100 NVL", 835, 417, 60, 94, 400, 1785, 55),
    _peaks("H100 PCIe", 756, 378, 51, 80, 350, 1755, 55),
    _peaks("H100", 989, 494, 67, 80, 700, 1980, 55),
    _peaks("H800", 989, 494, 67, 80, 700, 1980, 55),
    _peaks("H20", 148, 74, 44, 96, 500, 1980, 55),
    _peaks("A100 PCIe", 312, 156, 19.5, 80, 300, 1410, 25),
    _peaks("A100", 312, 156, 19.5, 80, 400, 1410, 25),
    _peaks("A800", 312, 156, 19.5, 80, 400, 1410, 25),
    _peaks("RTX PRO 6000", 504, 252, 126, 96, 600, 2617, 55),
    _peaks("RTX 6000 Ada", 364, 182, 91, 48, 300, 2505, 25),
    _peaks("RTX 5090", 209, 105, 105, 32, 575, 2407, 55),
    _peaks("RTX 4090", 165, 82.6, 82.6, 24, 450, 2520, 25),
    _peaks("RTX 3090", 71, 35.6, 35.6, 24, 350, 1695, 25),
    _peaks("L40S", 362, 183, 91.6, 48, 350, 2520, 25),
    _peaks("L40", 181, 90.5, 90.5, 48, 300, 2490, 25),
    _peaks("L4", 121, 60, 30.3, 24, 72, 2040, 25),
    _peaks("A40", 150, 75, 37.4, 48, 300, 1740, 25),
    _peaks("A10G", 70, 35, 35, 24, 300, 1710, 25),
    _peaks("A10", 125, 62.5, 31.2, 24, 150, 1695, 25),
    _peaks("V100", 125, 15.7, 15.7, 32, 300, 1530, 12),
    _peaks("T4", 65, 8.1, 8.1, 16, 70, 1590, 12),
)


# Bits of NVML's clock event reasons that mean that something holds the clock back. Idle (1), application
# clocks (2), sync boost (16) and the software power cap (4) do not: every card at full load is power-capped.
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


def peaks_of(name: str) -> Peaks | None:
    """The limits of a card by the name its driver gives, or nothing for one that the table lacks."""
    words = name.upper().replace("-", " ").replace("_", " ").split()
    for peaks in PEAKS:
        if all(_known(word, words) for word in peaks.name.upper().split()):
            return peaks
    return None


def _known(word: str, words: list[str]) -> bool:
    """Whole words, so that an L40 is no L4; "80GB" or "SXM4" may follow with or without a space."""
    return word in words or (len(word) > 3 and any(other.startswith(word) for other in words))
