"""All checks, in the order in which they are shown: the run, its software, GPUs, network, machine, folders. Pure."""

from __future__ import annotations

from packtrain.diagnose.checks import gpu as checks_gpu
from packtrain.diagnose.checks import host as checks_host
from packtrain.diagnose.checks import network as checks_network
from packtrain.diagnose.checks import software as checks_software
from packtrain.diagnose.checks.check import Check
from packtrain.diagnose.checks.needs import Needs
from packtrain.diagnose.facts.facts import Facts

ALL = (
    checks_host.check_run,
    checks_software.check_packages,
    checks_software.check_torch,
    checks_software.check_attention,
    checks_software.check_deepspeed,
    checks_gpu.check_driver,
    checks_gpu.check_number,
    checks_gpu.check_health,
    checks_gpu.check_pace,
    checks_gpu.check_busy,
    checks_gpu.check_gpu_memory,
    checks_network.check_infiniband,
    checks_network.check_memlock,
    checks_network.check_interfaces,
    checks_network.check_host_name,
    checks_network.check_name_server,
    checks_network.check_main_address,
    checks_host.check_shared_memory,
    checks_host.check_open_files,
    checks_host.check_memory,
    checks_host.check_cores,
    checks_host.check_clock,
    checks_host.check_folders,
    checks_host.check_variables,
)


def check_all(facts: Facts, needs: Needs) -> list[Check]:
    """What every check says of a machine and a run."""
    return [check for one in ALL for check in one(facts, needs)]
