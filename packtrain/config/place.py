"""The groups topology, tracking and verify, which no checkpoint records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from packtrain.config.objective import advanced, key

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio", "swanlab", "comet"]


@dataclass(kw_only=True, slots=True, frozen=True)
class Topology:
    """Processes and machines of the run, and options of its Slurm job."""

    kind: Literal["auto", "single", "local", "slurm", "env", "manual", "ray"] = key(
        "auto",
        "auto: join a running launch, else all machines of a Slurm job, else all GPUs of this machine, else one CPU process; "
        "manual: the same command once on every machine, each with its topology.node_rank; ray: the machines of a Ray cluster.",
    )
    nodes: int | None = key(None, "Machines; none for all of the Slurm job, else 1.", minimum=1, maximum=20_000)
    min_nodes: int | None = advanced(None, "Fewest machines that a restart may use; none waits for all.", minimum=1)
    gpus_per_node: int | None = key(None, "Processes per machine; none for one per GPU.", minimum=1, maximum=1024)
    main_address: str | None = key(None, "Host name or address of the first machine.")
    main_port: int | None = advanced(
        None, "TCP port on the first machine; none: a free one (29500 with topology=manual).", minimum=1, maximum=65535
    )
    node_rank: int | None = key(None, "manual: number of this machine, from 0.", minimum=0)
    join_timeout: int = advanced(300, "Seconds to wait for all processes at start.", minimum=1)
    step_timeout: int = advanced(
        600,
        "Most seconds that a collective operation may take. If the other processes wait for one without progress, the run "
        "ends with a diagnosis after nine tenths of this time; a checkpoint may take three times as long.",
        minimum=10,
    )
    grace: int | None = advanced(
        None,
        "Seconds from SIGTERM to the end of the processes, on machines that can be taken away (Kubernetes: 30, spot machines of AWS: 120). No "
        "checkpoint begins then if the last one took longer (docs/resume.md); none for no limit.",
        minimum=1,
    )
    environment: dict[str, Any] = advanced(
        {}, "Environment variables of every process; they win over the ones that packtrain sets."
    )
    time: str | None = key(
        None, 'Slurm: time limit, in quotes in a YAML (e.g. "12:00:00" or "2-00:00:00"); none for the partition\'s.'
    )
    signal_before: int = advanced(
        120, "Slurm: write a checkpoint and stop this many seconds before the time limit.", minimum=1, maximum=65535
    )
    requeue: bool = advanced(False, "Slurm: put a job back into the queue after its time limit, or a lost machine.")
    command: str | None = advanced(
        None,
        "Slurm, deploy: bash command (after srun) that starts packtrain on a machine: VENV/bin/packtrain, or a container; none for the "
        "packtrain that writes the script, or the one in the image.",
    )
    setup: list[str] = advanced(
        [], "Slurm, deploy: shell lines before the run (e.g. module load cuda); Slurm's on the first machine."
    )
    sbatch: list[str] = key([], "Slurm: options of sbatch (e.g. --account=lab, --mem=0); --gres=none for no GPUs.")

    @property
    def variables(self) -> dict[str, str]:
        """`environment` for processes: numbers become text."""
        return {name: str(value) for name, value in self.environment.items()}


@dataclass(kw_only=True, slots=True, frozen=True)
class Tracking:
    """Where metrics go beside metrics.jsonl."""

    report_to: list[Tracker] = key([], "Trackers, through transformers' integrations.")
    run_name: str | None = key(None, "Name of the run in the trackers; the run folder's name if none.")


@dataclass(kw_only=True, slots=True, frozen=True)
class Verify:
    """Proofs on the loaded model."""

    preflight: bool = key(
        True,
        "Prove before step 1 that documents in a row cannot see each other, and compare the first losses with losses of "
        "padded batches; model.attention=auto is always proved.",
    )
