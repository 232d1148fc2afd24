"""Cards: what NVML and nvidia-smi say becomes the same record; what they do not say is unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from stoker.machine import nvml, smi
from stoker.machine.cards import read_cards
from stoker.machine.files import Files
from stoker.machine.plain import Unknown

if TYPE_CHECKING:
    from pathlib import Path

XML = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <driver_version>580.159.03</driver_version>
  <cuda_version>13.0</cuda_version>
  <attached_gpus>1</attached_gpus>
  <gpu id="00000000:18:00.0">
    <product_name>NVIDIA H200</product_name>
    <persistence_mode>Enabled</persistence_mode>
    <pci>
      <pci_bus_id>00000000:18:00.0</pci_bus_id>
      <pci_gpu_link_info>
        <pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>5</current_link_gen></pcie_gen>
        <link_widths><max_link_width>16x</max_link_width><current_link_width>8x</current_link_width></link_widths>
      </pci_gpu_link_info>
    </pci>
    <performance_state>P0</performance_state>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Not Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
      <clocks_event_reason_hw_thermal_slowdown>Active</clocks_event_reason_hw_thermal_slowdown>
    </clocks_event_reasons>
    <ecc_mode><current_ecc>Enabled</current_ecc><pending_ecc>Enabled</pending_ecc></ecc_mode>
    <ecc_errors><volatile>
      <sram_uncorrectable_parity>1</sram_uncorrectable_parity>
      <dram_correctable>7</dram_correctable>
      <dram_uncorrectable>2</dram_uncorrectable>
    </volatile></ecc_errors>
    <remapped_rows>
      <remapped_row_corr>1</remapped_row_corr>
      <remapped_row_unc>2</remapped_row_unc>
      <remapped_row_pending>No</remapped_row_pending>
      <remapped_row_failure>No</remapped_row_failure>
    </remapped_rows>
    <retired_pages>
      <multiple_single_bit_retirement><retired_count>0</retired_count></multiple_single_bit_retirement>
      <double_bit_retirement><retired_count>3</retired_count></double_bit_retirement>
      <pending_retirement>Yes</pending_retirement>
    </retired_pages>
    <mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode>
    <fabric><state>Completed</state><status>Success</status></fabric>
    <gpu_power_readings>
      <current_power_limit>650.00 W</current_power_limit>
      <default_power_limit>700.00 W</default_power_limit>
    </gpu_power_readings>
    <applications_clocks><graphics_clock>1500 MHz</graphics_clock></applications_clocks>
    <default_applications_clocks><graphics_clock>1980 MHz</graphics_clock></default_applications_clocks>
  </gpu>
</nvidia_smi_log>
"""

TOPOLOGY = """ \tGPU0\tGPU1
 GPU0\tX\tCNS
 GPU1\tCNS\tX

Legend:

  X    = Self
  OK   = Status Ok
"""

LINKS = """GPU 0: NVIDIA H200 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
GPU 1: NVIDIA H200 (UUID: GPU-2)
\t Link 0: 26.562 GB/s
"""


class StandIn:
    """pynvml with two cards, which answers some questions and refuses others."""

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.1"

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:
        return f"card {index}"

    def nvmlDeviceGetP2PStatus(self, one: object, other: object, kind: int) -> int:
        return 0

    def nvmlDeviceGetNvLinkState(self, card: object, link: int) -> int:
        if link >= 4:
            raise RuntimeError("Invalid Argument")
        return int(link != 3)

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlDeviceGetPersistenceMode": 0,
            "nvmlDeviceGetPowerManagementLimit": 650_000,
            "nvmlDeviceGetCurrentClocksEventReasons": 0x04 | 0x40,
            "nvmlDeviceGetRemappedRows": (0, 0, 1, 0),
            "nvmlDeviceGetMigMode": [1, 1],
            "nvmlSystemGetCudaDriverVersion_v2": 12040,
        }

        def answer(*_: object) -> Any:
            if name not in answers:
                raise RuntimeError("Not Supported")
            return answers[name]

        return answer


def test_nvidia_smi_tells_a_card() -> None:
    found = smi.cards_of(XML)
    (card,) = found.cards
    assert (found.driver, found.cuda) == ("580.159.03", "13.0")
    assert (card.mig, card.fabric, card.remap_failed, card.rows_remapped) == (False, "Completed", False, 2)
    assert (card.pages_retired, card.retire_pending) == (3, True)
    assert (found.driver, card.name, card.bus) == ("580.159.03", "NVIDIA H200", "0000:18:00.0")
    assert (card.persistence, card.ecc, card.remap_pending, card.performance_state) == (True, True, False, 0)
    assert (card.pcie_gen, card.pcie_gen_max, card.pcie_width, card.pcie_width_max) == (5, 5, 8, 16)
    assert (card.power_limit_w, card.power_default_w) == (650.0, 700.0)
    assert (card.clock_set_mhz, card.clock_default_mhz) == (1500, 1980)


def test_a_software_power_cap_is_no_slowdown() -> None:
    (card,) = smi.cards_of(XML).cards
    assert card.slowdowns == ("hardware thermal slowdown",)
    assert nvml.slowdowns_of(0x04) == ()


def test_only_uncorrected_errors_are_counted() -> None:
    (card,) = smi.cards_of(XML).cards
    assert card.ecc_uncorrected == 3


def test_what_nvidia_smi_does_not_say_is_unknown() -> None:
    (card,) = smi.cards_of(
        "<nvidia_smi_log><gpu><persistence_mode>N/A</persistence_mode></gpu></nvidia_smi_log>"
    ).cards
    assert all(
        isinstance(value, Unknown) for value in (card.name, card.persistence, card.pcie_gen, card.slowdowns)
    )
    assert (card.ecc, card.mig, card.fabric) == (None, None, None)


def test_peers_and_links_are_read_as_nvidia_smi_writes_them() -> None:
    assert smi.peers_of(TOPOLOGY) == (("X", "CNS"), ("CNS", "X"))
    assert smi.links_of(LINKS) == [(True, False), (True,)]


def test_nvml_tells_a_card_and_refuses_the_rest() -> None:
    found = nvml.cards_of(StandIn())
    cards = found.cards
    assert (found.driver, found.cuda, len(cards)) == ("580.1", "12.4", 2)
    assert found.peers == (("X", "OK"), ("OK", "X"))
    assert (cards[0].mig, cards[0].rows_remapped, cards[0].remap_failed) == (True, 0, False)
    assert cards[0].fabric is None
    assert (cards[0].name, cards[0].persistence, cards[0].power_limit_w) == ("NVIDIA H200", False, 650.0)
    assert (cards[0].remap_pending, cards[0].nvlinks) == (True, (True, True, True, False))
    assert cards[0].slowdowns == ("hardware thermal slowdown",)
    assert cards[0].ecc is None  # refused as not supported: a card without
    assert isinstance(cards[0].pcie_gen, Unknown)


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nvidia-ml-py is not installed."""
    import sys

    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.mark.usefixtures("no_nvml")
def test_without_nvml_the_program_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log.xml").write_text(XML)
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$1" = -q ] && cat {tmp_path}/log.xml\nexit 0\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    cards, stack = read_cards(Files(tmp_path), {})
    assert isinstance(cards, tuple)
    assert ([card.name for card in cards], stack.driver) == (["NVIDIA H200"], "580.159.03")


@pytest.mark.usefixtures("no_nvml")
def test_a_card_on_the_bus_without_a_driver_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "sys" / "bus" / "pci" / "devices" / "0000:18:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    cards, stack = read_cards(Files(tmp_path), {})
    assert (stack.on_bus, isinstance(cards, Unknown)) == (1, True)


@pytest.mark.usefixtures("no_nvml")
def test_a_machine_without_cards_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_cards(Files(tmp_path), {})[0] == ()


def test_comments_in_the_cufile_configuration_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "cufile.json").write_text(
        '{\n  // a comment\n  "properties": {\n    "allow_compat_mode": false // another\n  }\n}\n'
    )
    assert read_cards(Files(tmp_path), {})[1].cufile_compat is False
