"""The table of peaks knows cards by the names their drivers give."""

from __future__ import annotations

import pytest

from stoker.gpus import PEAKS, peaks_of


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_a_card_is_found_by_its_name(name: str, entry: str) -> None:
    peaks = peaks_of(name)
    assert peaks is not None
    assert peaks.name == entry


@pytest.mark.parametrize("name", ["", "AMD Instinct MI300X", "NVIDIA Q9000"])
def test_an_unknown_card_is_unknown(name: str) -> None:
    assert peaks_of(name) is None


def test_lower_precision_is_never_slower() -> None:
    assert all(one.bf16 >= one.tf32 >= one.fp32 for one in PEAKS)
