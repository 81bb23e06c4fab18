"""Machines as the system describes them, in the words of nvidia-smi and of /sys, to read facts from without any of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_GPU = """\
	<gpu id="{bus}">
		<product_name>{name}</product_name>
		<product_architecture>Hopper</product_architecture>
		<mig_mode>
			<current_mig>{mig}</current_mig>
			<pending_mig>{mig}</pending_mig>
		</mig_mode>
		<uuid>{uuid}</uuid>
		<minor_number>0</minor_number>
		<gpu_recovery_action>None</gpu_recovery_action>
		<pci>
			<pci_gpu_link_info>
				<pcie_gen>
					<max_link_gen>5</max_link_gen>
					<current_link_gen>5</current_link_gen>
				</pcie_gen>
				<link_widths>
					<max_link_width>16x</max_link_width>
					<current_link_width>{width}</current_link_width>
				</link_widths>
			</pci_gpu_link_info>
		</pci>
		<performance_state>P0</performance_state>
		<clocks_event_reasons>
			<clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
			<clocks_event_reason_sw_power_cap>Not Active</clocks_event_reason_sw_power_cap>
			<clocks_event_reason_hw_slowdown>{slowdown}</clocks_event_reason_hw_slowdown>
			<clocks_event_reason_hw_thermal_slowdown>{slowdown}</clocks_event_reason_hw_thermal_slowdown>
			<clocks_event_reason_hw_power_brake_slowdown>Not Active</clocks_event_reason_hw_power_brake_slowdown>
			<clocks_event_reason_sw_thermal_slowdown>Not Active</clocks_event_reason_sw_thermal_slowdown>
		</clocks_event_reasons>
		<fb_memory_usage>
			<total>{memory} MiB</total>
			<reserved>553 MiB</reserved>
			<used>{used} MiB</used>
			<free>80000 MiB</free>
		</fb_memory_usage>
		<compute_mode>Default</compute_mode>
		<utilization>
			<gpu_util>{busy} %</gpu_util>
			<memory_util>0 %</memory_util>
		</utilization>
		<ecc_mode>
			<current_ecc>Enabled</current_ecc>
			<pending_ecc>Enabled</pending_ecc>
		</ecc_mode>
		<ecc_errors>
			<volatile>
				<sram_correctable>0</sram_correctable>
				<sram_uncorrectable_parity>0</sram_uncorrectable_parity>
				<sram_uncorrectable_secded>0</sram_uncorrectable_secded>
				<dram_correctable>3</dram_correctable>
				<dram_uncorrectable>{uncorrected}</dram_uncorrectable>
			</volatile>
			<aggregate>
				<dram_uncorrectable>7</dram_uncorrectable>
			</aggregate>
		</ecc_errors>
		<retired_pages>
			<pending_retirement>N/A</pending_retirement>
		</retired_pages>
		<remapped_rows>
			<remapped_row_corr>0</remapped_row_corr>
			<remapped_row_unc>0</remapped_row_unc>
			<remapped_row_pending>{pending}</remapped_row_pending>
			<remapped_row_failure>{failure}</remapped_row_failure>
		</remapped_rows>
		<temperature>
			<gpu_temp>{heat} C</gpu_temp>
			<gpu_temp_tlimit>58 C</gpu_temp_tlimit>
		</temperature>
		<gpu_power_readings>
			<power_state>P0</power_state>
			<instant_power_draw>71.05 W</instant_power_draw>
			<current_power_limit>{power}.00 W</current_power_limit>
			<default_power_limit>700.00 W</default_power_limit>
		</gpu_power_readings>
		<clocks>
			<graphics_clock>345 MHz</graphics_clock>
			<sm_clock>345 MHz</sm_clock>
		</clocks>
		<applications_clocks>
			<graphics_clock>{clock}</graphics_clock>
		</applications_clocks>
		<max_clocks>
			<graphics_clock>1980 MHz</graphics_clock>
			<sm_clock>1980 MHz</sm_clock>
		</max_clocks>
		<fabric>
			<state>{fabric}</state>
			<status>{fabric_status}</status>
		</fabric>
		<processes>{processes}</processes>
	</gpu>
"""
_PROCESS = """
			<process_info>
				<pid>{pid}</pid>
				<type>{kind}</type>
				<process_name>{name}</process_name>
				<used_memory>{used} MiB</used_memory>
			</process_info>"""
_HEALTHY = {
    "name": "NVIDIA H100 80GB HBM3",
    "mig": "Disabled",
    "width": "16x",
    "slowdown": "Not Active",
    "memory": 81559,
    "used": 4,
    "busy": 0,
    "uncorrected": 0,
    "pending": "No",
    "failure": "No",
    "heat": 31,
    "power": 700,
    "clock": "Requested functionality has been deprecated",
    "fabric": "Completed",
    "fabric_status": "Success",
    "processes": "",
}


def uuid(index: int) -> str:
    """That of a GPU."""
    return f"GPU-{index:08x}-aaaa-bbbb-cccc-0123456789ab"


def nvidia_smi(*gpus: Mapping[str, object], driver: str = "570.133.20", cuda: str = "12.8") -> str:
    """`nvidia-smi -q -x` of a machine with as many GPUs as are given; each says what is not as in a healthy H100."""
    found = [
        _GPU.format(**{**_HEALTHY, "bus": f"00000000:{0x19 + 8 * index:02X}:00.0", "uuid": uuid(index), **one})
        for index, one in enumerate(gpus)
    ]
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
        f"\t<timestamp>Mon Nov  3 10:15:00 2025</timestamp>\n\t<driver_version>{driver}</driver_version>\n"
        f"\t<cuda_version>{cuda}</cuda_version>\n\t<attached_gpus>{len(gpus)}</attached_gpus>\n"
        f"{''.join(found)}</nvidia_smi_log>\n"
    )


def process(pid: int, name: str, *, used: int = 60000, kind: str = "C") -> str:
    """A program on a GPU, as in `nvidia_smi({"processes": …})`."""
    return _PROCESS.format(pid=pid, name=name, used=used, kind=kind)


def topology(gpus: int, link: str = "NV18") -> str:
    """`nvidia-smi topo -m`, with the colours that it prints also where nobody sees them."""
    names = [f"GPU{index}" for index in range(gpus)]
    rows = ["\t" + "\t".join(f"\x1b[4m{name}" for name in names) + "\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m"]
    for own in range(gpus):
        cells = [" X " if other == own else link for other in range(gpus)]
        rows.append(f"{names[own]}\t" + "\t".join(cells) + "\tPIX\t0-55,112-167\t0")
    return "\n".join(
        [*rows, "NIC0\tPIX\tSYS\t X ", "", "Legend:", "", "  X    = Self", "NIC Legend:", "  NIC0: mlx5_0"]
    )


def nvlinks(*up: int) -> str:
    """`nvidia-smi nvlink --status` of GPUs with 18 links each, of which so many are up."""
    lines = []
    for index, number in enumerate(up):
        lines.append(f"GPU {index}: NVIDIA H100 80GB HBM3 (UUID: {uuid(index)})")
        lines += [f"\t Link {at}: {'26.562 GB/s' if at < number else '<inactive>'}" for at in range(18)]
    return "\n".join(lines) + "\n"


def write_port(root: Path, device: str, **files: str) -> None:
    """An RDMA device with one port below `root`/sys; a healthy InfiniBand port unless said otherwise.

    `interface` is the network interface of the same card.
    """
    folder = root / "sys/class/infiniband" / device
    port = folder / "ports/1"
    port.mkdir(parents=True)
    if interface := files.pop("interface", ""):
        (folder / "device/net" / interface).mkdir(parents=True)
    healthy = {
        "state": "4: ACTIVE",
        "phys_state": "5: LinkUp",
        "rate": "400 Gb/sec (4X NDR)",
        "link_layer": "InfiniBand",
    }
    for name, text in {**healthy, **files}.items():
        (port / name).write_text(f"{text}\n")
