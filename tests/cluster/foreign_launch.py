"""Stands in for launchers that are not ours: `python -m tests.cluster.foreign_launch mpirun|srun|cyclic|hand NUMBER` runs
worker.py of its folder NUMBER times, with the variables that they set; `cyclic` is srun on two machines, ranks in turn.

Like srun without --kill-on-bad-exit it ends nobody, and ends itself with the greatest exit code of all. As srun it starts each
rank inside a process of its own, as in `srun bash -c '…; packtrain …'`.
"""

from __future__ import annotations

import os
import runpy
import sys

import packtrain.config.compose
import packtrain.launch.execute  # noqa: F401 (once for all ranks)


def variables(launcher: str, rank: int, number: int, port: str) -> dict[str, str]:
    """What the launcher tells a rank; all are on one machine."""
    own = str(os.getpid())
    if launcher == "mpirun":
        numbers = {"RANK": rank, "SIZE": number, "LOCAL_RANK": rank, "LOCAL_SIZE": number}
        said = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in numbers.items()}
        return {**said, "PMIX_NAMESPACE": f"prterun-n1-{own}@1", "MASTER_PORT": port}
    if launcher == "hand":
        numbers = {"RANK": rank, "WORLD_SIZE": number, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": number}
        return {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    job = {"SLURM_JOB_ID": own, "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "localhost", "SLURM_NODEID": "0"}
    if launcher == "cyclic":
        job |= {"SLURM_JOB_NODELIST": "localhost,localhost2", "SLURM_NODEID": str(rank % 2)}
        step = {"SLURM_STEP_NUM_TASKS": str(number), "SLURM_STEP_TASKS_PER_NODE": f"{number // 2}(x2)"}
        return {**job, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank // 2)}
    step = {"SLURM_STEP_NUM_TASKS": str(number), "SLURM_STEP_TASKS_PER_NODE": str(number)}
    return {**job, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}


def start(launcher: str, number: int, port: str) -> int:
    """Runs all to their end and returns the greatest exit code."""
    started = [_fork(launcher, rank, number, port) for rank in range(number)]
    return max(_code(pid) for pid in started)


def _fork(launcher: str, rank: int, number: int, port: str) -> int:
    told = variables(launcher, rank, number, port)
    pid = os.fork()
    if pid:
        return pid
    if launcher == "srun" and (inner := os.fork()):
        os._exit(_code(inner))
    os.environ.update(told)
    sys.argv = ["worker.py"]
    try:
        runpy.run_path("worker.py", run_name="__main__")
    except SystemExit as end:
        os._exit(int(end.code or 0))
    os._exit(0)


def _code(pid: int) -> int:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(start(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
