"""`packtrain sbatch`: what is in the script, that bash hands every argument on as it was, and what sbatch's answers become.

The scripts are run by bash with an srun that only notes how it was called; tests/cluster/test_slurm.py runs them for real.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from packtrain.config.compose import load_config, load_points
from packtrain.config.keys import keys
from packtrain.config.rules.slurm import count_gpus
from packtrain.config.schema import Topology
from packtrain.config.yaml_files import shipped
from packtrain.run_folder import RunFolder, write_json
from tests.unit.command_line import Done, packtrain

RUN = ["model.path=owner/model", "data.train=owner/data", "batch.examples_per_step=32", "trainer.output_dir=runs/x"]
MACHINES = ["topology.nodes=2", "topology.gpus_per_node=4"]
PAGE = Path(__file__).parents[3] / "docs" / "slurm.md"
TEMPLATES = sorted(shipped("slurm").glob("*.sbatch"))
SRUN = """#!/usr/bin/env python3
import json, os, sys
json.dump(sys.argv[1:], open(os.environ["CALLED"], "w"))
if "CHECKPOINT" in os.environ: os.makedirs(os.environ["CHECKPOINT"])
sys.exit(int(os.environ.get("CODE", 0)))
"""
SBATCH = """#!/usr/bin/env python3
import json, os, sys
text = open(sys.argv[-1]).read() if os.path.exists(sys.argv[-1]) else sys.stdin.read()
json.dump([sys.argv[1:], text, dict(os.environ)], open(os.environ["CALLED"], "w"))
if "REFUSES" in os.environ: sys.exit("sbatch: error: " + os.environ["REFUSES"])
if "--test-only" in sys.argv:
    if "UNFIT" in os.environ: sys.exit("allocation failure: Requested node configuration is not available")
    sys.exit(print("sbatch: Job 8 to start at once", file=sys.stderr))
print("77;here")
"""


@pytest.fixture(autouse=True)
def _at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, and programs of our own in place of Slurm's."""
    programs = tmp_path / "programs"
    programs.mkdir()
    scontrol = '#!/bin/sh\necho "$@" > "$CALLED.scontrol"\n'
    squeue = '#!/bin/sh\necho "PENDING (${REASON:-Resources})"\n'
    for name, text in (("srun", SRUN), ("sbatch", SBATCH), ("scontrol", scontrol), ("squeue", squeue)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLED", str(tmp_path / "called"))
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


def sbatch(*arguments: str, verb: str = "sft") -> Done:
    return packtrain("sbatch", verb, *RUN, *arguments, folder=Path.cwd())


def script(*arguments: str, verb: str = "sft") -> str:
    done = sbatch(*MACHINES, *arguments, verb=verb)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(text: str, folder: Path, **variables: str) -> tuple[int, list[str]]:
    """Runs a script as Slurm would, from the folder of its --chdir; its exit code, and what srun was called with."""
    called = folder.parent / "called"
    called.unlink(missing_ok=True)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_ON_NODE": "6", "CALLED": str(called)}
    env = {**os.environ, **job, **variables}
    done = subprocess.run(["bash", "-s"], input=text, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(called.read_text()) if called.exists() else []


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


RESTARTED = ["trainer.restarts=1", "trainer.checkpoint_every=5", "topology.min_nodes=1"]
# Every Slurm key: what is given, and the line that it becomes.
GIVEN = [
    (["topology.time=2-00:00:00"], "#SBATCH --time=2-00:00:00"),
    (["topology.signal_before=300"], "#SBATCH --signal=TERM@300"),
    (["topology.requeue=true"], "#SBATCH --requeue"),
    (["topology.command='~/v/bin/packtrain'"], "  ~/v/bin/packtrain sft model.path=owner/model"),
    (["topology.setup=['ulimit -n 4096']"], "ulimit -n 4096"),
    (["topology.sbatch=['--exclude=n7','-A lab']"], "#SBATCH --exclude=n7\n#SBATCH -A lab\n"),
]


def test_each_slurm_key_becomes_its_line() -> None:
    for given, line in GIVEN:
        assert line in script(*given)
    named = {override.split("=")[0] for given, _ in GIVEN for override in given}
    assert named == {path for path, key in keys().items() if key.doc.startswith(("Slurm:", "Slurm, deploy:"))}


def test_a_script_asks_for_machines_tasks_gpus_and_the_log_and_for_nothing_that_is_not_set(tmp_path: Path) -> None:
    assert directives(script()) == [
        "--job-name=x",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gres=gpu:4",
        f"--chdir={tmp_path}/home",
        f"--output={tmp_path}/home/runs/x/logs/slurm-%j.log",
        "--open-mode=append",
        "--signal=TERM@120",
        "--export=ALL",
    ]
    assert (tmp_path / "home/runs/x/logs").is_dir()  # without it Slurm would end the job without a word
    assert "# 2 machines × 4 processes on CPUs = 8 processes" in script("topology.sbatch=['--gres=none']")
    # modules need a login shell
    assert script("topology.setup=['module load cuda']").startswith("#!/bin/bash -l\n")
    assert script("topology.setup=['echo module']").startswith("#!/bin/bash\n")


def test_an_option_of_the_users_stands_in_place_of_packtrains() -> None:
    gpus = ("--gres=gpu:h100:4", "--gres gpu:4,nvme:1", "--gres=none", "--gpus-per-node=4", "-G 8", "--mem=0 --gpus=8")
    for line in (*gpus, "--job-name='my run'", "-J mine"):
        lines, option = directives(script(f'topology.sbatch=["{line}"]')), "gres" if line in gpus else "job-name"
        assert line in lines and not any(one.startswith(f"--{option}=") for one in lines if one != line)


@pytest.mark.parametrize(
    ("at", "words"),
    [
        (0, "--container-image=./train.sqsh --container-mounts=HOME:HOME,/data:/data --container-workdir=HOME"),
        (1, "apptainer exec --nv --bind=HOME --bind=/data --pwd=HOME train.sif"),
    ],
)
def test_the_containers_of_the_page_start_the_run_inside(at: int, words: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    inside = [block.split("```")[0] for block in PAGE.read_text().split("```yaml\n") if block.startswith("command: ")]
    Path("run.yaml").write_text(f"topology:\n  {inside[at]}")
    done = packtrain("sbatch", "sft", "run.yaml", *RUN, *MACHINES, folder=home)
    _, called = run(done.stdout, home)
    assert called[6 : called.index("sft")] == [*words.replace("HOME", str(home)).split(), "packtrain"]


def test_every_argument_reaches_packtrain_as_it_was_written(tmp_path: Path) -> None:
    hostile = [
        "model.revision='a b'",
        'tracking.run_name="it\'s $HOME `id` # & ; * ü"',
        "data.columns={prompt: 'a\nb'}",
    ]
    code, called = run(script(*hostile), tmp_path / "home")
    assert code == 0
    assert called[called.index("sft") :] == ["sft", *RUN, *MACHINES, *hostile]
    before = called[: called.index("sft")]
    flags = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=6", "--kill-on-bad-exit=0", "--wait=0"]
    assert before[:-1] == flags or before[:-3] == flags


def test_the_job_ends_with_the_exit_code_of_the_run(tmp_path: Path) -> None:
    for code in (0, 2, 3, 4, 130, 143):
        assert run(script(), tmp_path / "home", CODE=str(code))[0] == code


@pytest.mark.parametrize(("code", "checkpoint"), [(143, True), (143, False), (0, True), (130, True)])
def test_a_job_goes_back_into_the_queue_only_when_it_was_stopped_in_time_and_got_further(code, checkpoint, tmp_path):
    made = tmp_path / "home/runs/x/checkpoints/step-000020"
    RunFolder(made.parents[1]).open_attempt("auto")
    (made.parent / "step-000010").mkdir(parents=True)
    variables = {"CHECKPOINT": str(made)} if checkpoint else {}
    run(script("topology.requeue=true"), tmp_path / "home", CODE=str(code), **variables)
    asked = tmp_path / "called.scontrol"
    assert (asked.read_text() == "requeue 7\n") if (code, checkpoint) == (143, True) else not asked.exists()


@pytest.mark.parametrize(("status", "code"), [("done", 0), ("stopped", 137), (None, 137)])
def test_the_code_of_a_lost_machine_is_not_that_of_a_run_that_went_on_without_it(status, code, tmp_path):
    folder = tmp_path / "home/runs/x"
    RunFolder(folder).open_attempt("auto")
    if status:
        write_json(RunFolder(folder).summary, {"status": status})
        os.utime(RunFolder(folder).summary, (time.time() + 60,) * 2)
    text = script(*RESTARTED)
    assert "--no-kill" in directives(text) and "--wait=0 --no-kill" in text and "no-kill" not in script()
    assert run(text, tmp_path / "home", CODE="137")[0] == code


SWEEP = ["optim.learning_rate=1e-5,2e-5", "trainer.seed=range(0,2)", "-m"]


def test_an_array_has_a_run_folder_for_each_point_and_a_task_of_it_comes_back_alone(tmp_path: Path) -> None:
    text = script(*SWEEP, "topology.requeue=true")
    assert "--array=0-3" in directives(text) and "4 runs, each on 2 machines × 4 GPUs" in text
    assert f"--output={tmp_path}/home/runs/x/logs/slurm-%A_%a.log" in directives(text)
    folders = set()
    for number, (rate, seed) in enumerate([("1e-05", 0), ("1e-05", 1), ("2e-05", 0), ("2e-05", 1)]):
        array = {"SLURM_ARRAY_TASK_ID": str(number), "SLURM_ARRAY_JOB_ID": "5"}
        _, called = run(text, tmp_path / "home", **array)
        config = load_config(None, called[called.index("sft") + 1 :])
        assert (config.optim.learning_rate, config.trainer.seed) == (float(rate), seed)
        assert config.trainer.output_dir == f"runs/x/optim.learning_rate={rate}_trainer.seed={seed}"
        folders.add(config.trainer.output_dir)
    assert len(folders) == 4
    assert run(text, tmp_path / "home", SLURM_ARRAY_TASK_ID="4") == (2, [])
    made = str(tmp_path / "home/runs/x/trainer.seed=2/checkpoints/step-000001")
    text = script("trainer.seed=1,2", "-m", "topology.requeue=true")
    run(text, tmp_path / "home", CODE="143", CHECKPOINT=made, SLURM_ARRAY_TASK_ID="1", SLURM_ARRAY_JOB_ID="5")
    assert (tmp_path / "called.scontrol").read_text() == "requeue 5_1\n"


@pytest.mark.parametrize(
    ("swept", "names"),
    [
        ("trainer.output_dir=a,b", ["a", "b"]),
        ("peft=none,lora", ["runs/x/peft=none", "runs/x/peft=lora"]),
        ("data.eval='a b','a/b'", ["runs/x/0-data.eval=-a-b-", "runs/x/1-data.eval=-a-b-"]),
    ],
)
def test_points_have_folders_that_tell_them_apart(swept: str, names: list[str]) -> None:
    points, shared = load_points(None, [*RUN, swept])
    assert [point.config.trainer.output_dir for point in points] == names
    assert shared == RUN


@pytest.mark.parametrize(
    ("given", "where", "said"),
    [
        (["topology.gpus_per_node=8"], "topology.nodes", "[machines-unknown]"),
        ([*MACHINES, "topology=manual"], "topology.kind", "[numbered-by-launcher]"),
        ([*MACHINES, "topology.main_address=n9"], "topology.main_address", "[numbered-by-launcher]"),
        ([*MACHINES, "objective.kind=dpo"], "objective.kind", "this config is for packtrain dpo"),
        ([*MACHINES, "batch.examples_per_step=null", "batch.tokens_per_step=8192"], "batch.tokens_per_step", "65536"),
        ([*MACHINES, "-m"], "-m", "[nothing-to-sweep]"),
        ([*MACHINES, "-m", "topology.signal_before=60,90"], "topology", "[topologies-differ]"),
        ([*MACHINES, "trainer.seed=1,2"], "trainer.seed=1,2", "sbatch VERB CONFIG -m"),
        ([*MACHINES, "topology.time=30"], "topology.time", "Quote it"),
        ([*MACHINES, "topology.sbatch=['--gres=gpu:2']"], "topology.gpus_per_node", "asks for 2 GPUs"),
        ([*MACHINES, "topology.signal_before=70000"], "topology.signal_before", "65535"),
        ([*MACHINES, "topology.sbatch=['--nodes=3']"], "topology.sbatch[0]", "Set topology.nodes."),
        ([*MACHINES, "topology.sbatch=['--signal=B:USR1']"], "topology.sbatch[0]", "Set topology.signal_before."),
        ([*MACHINES, "topology.sbatch=['--container-image=a']"], "topology.sbatch[0]", "topology.command"),
        ([*MACHINES, 'topology.sbatch=["--job-name=\'a"]'], "topology.sbatch[0]", "[not-an-sbatch-option]"),
        ([*MACHINES, "topology.sbatch=['--mem=0\n#SBATCH -N 3']"], "topology.sbatch[0]", "[not-an-sbatch-option]"),
        ([*MACHINES, "topology.command='a\nb'"], "topology.command", "[line-break]"),
        ([*MACHINES, "trainer.output_dir='a\n#SBATCH --uid=0'"], "trainer.output_dir", "[line-break]"),
        ([*MACHINES, "topology.requeue=true", "trainer.resume=never"], "topology.requeue", "[requeue-without-resume]"),
    ],
)
def test_what_cannot_work_is_refused_with_its_key(given: list[str], where: str, said: str) -> None:
    done = sbatch(*given)
    assert done.returncode == 2 and done.stdout == ""
    assert where in done.stderr and said in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "export HF_TOKEN=hf_abcabc",
        'X=1 WANDB_API_KEY="abcabc" true',
        "hf auth login --token hf_abcabcabc",
        "wandb login 0123456789abcabcabc0123456789abcabcabcab",
        "git clone https://me:abcabc@example.org/x",
        'curl -H "Authorization: Bearer qrsqrs" x',  # a secret that no case before has taught this process
    ],
)
def test_what_the_user_writes_into_setup_stays_in_the_script_and_nowhere_else(line: str, tmp_path: Path) -> None:
    done = sbatch(*MACHINES, f"topology.setup=['{line}']")
    assert done.returncode == 0, done.stderr
    assert "note: topology.setup[0]: it has a secret, and the script shows it" in done.stderr
    assert line in done.stdout.splitlines()
    made_by = next(one for one in done.stdout.splitlines() if one.startswith("# Made by"))
    assert "abc" not in made_by + done.stderr and "qrs" not in made_by + done.stderr


def test_variables_that_are_named_or_read_from_a_file_are_no_secrets() -> None:
    assert "HF_TOKEN=$(cat ~/.token)" in script("topology.setup=['export HF_TOKEN=$(cat ~/.token)']")
    assert "KEY=$OTHER" in script("topology.setup=['export API_KEY=$OTHER HF_TOKEN_PATH=$HOME']")
    script("+topology.environment.TOKENIZERS_PARALLELISM='false'")
    script(
        "topology.setup=['hf auth login --token $HF_TOKEN', 'git clone https://$ME:$PASS@example.org/x', 'x --key -v']"
    )
    script("topology.setup=['wandb login \"$WANDB_API_KEY\"', 'curl http://n1:8080/a@b', 'rsync n1:/data /tmp']")


def test_submitting_writes_the_script_beside_the_log_and_says_what_comes_next(tmp_path: Path) -> None:
    done = sbatch(*MACHINES, "--submit")
    assert done.returncode == 0, done.stderr
    arguments, text, _ = json.loads((tmp_path / "called").read_text())
    assert arguments[0] == "--parsable"
    logs = tmp_path / "home/runs/x/logs"
    assert [file.name for file in logs.iterdir()] == ["slurm-77.sbatch"]
    assert (logs / "slurm-77.sbatch").read_text() == text == script()
    for said in (
        "77: 2 machines × 4 GPUs = 8 processes; ",
        "runs/x/logs/slurm-77.sbatch",
        "tail -n +1 -F runs/x/logs/slurm-77.log",
        "squeue -j 77    (now: PENDING (Resources))",
        "scancel --signal=TERM 77",
        "scancel 77",
    ):
        assert said in done.stdout
    done = sbatch(*MACHINES, "--submit", "topology.requeue=true")
    assert "scontrol update JobId=77 Requeue=0 && scancel --signal=TERM 77" in done.stdout


def test_json_tells_the_job_the_script_and_the_logs(tmp_path: Path) -> None:
    logs = tmp_path / "home/runs/x/logs"
    told = json.loads(sbatch(*MACHINES, "--submit", "--json").stdout)
    assert told == {
        "job_id": "77",
        "state": "PENDING (Resources)",
        "script": str(logs / "slurm-77.sbatch"),
        "log": str(logs / "slurm-77.log"),
        "output_dir": str(logs.parent),
    }
    several = json.loads(sbatch(*MACHINES, "--submit", "--json", "trainer.seed=1,2", "-m").stdout)
    assert several["log"] == str(logs / "slurm-77_%a.log")
    assert several["runs"][1]["output_dir"] == str(logs.parent / "trainer.seed=2")
    assert several["runs"][1]["log"] == str(logs / "slurm-77_1.log")
    written = json.loads(sbatch(*MACHINES, "--json").stdout)
    assert (written["job_id"], written["script"], written["text"]) == (None, None, script())


def test_a_script_can_be_written_to_a_file(tmp_path: Path) -> None:
    done = sbatch(*MACHINES, "-o", "job.sbatch")
    assert (done.returncode, done.stdout) == (0, "") and "sbatch job.sbatch" in done.stderr
    assert Path("job.sbatch").read_text().replace("-o job.sbatch", "") == script()
    assert sbatch(*MACHINES, "-o", "job.sbatch").returncode == 0  # its own may be replaced
    assert sbatch(*MACHINES, "-o", "no/job.sbatch").returncode == 2
    assert sbatch(*MACHINES, "-o", "own.sbatch", "--submit").returncode == 0 and Path("own.sbatch").exists()


def test_files_of_others_are_refused_and_not_touched(tmp_path: Path) -> None:
    theirs = tmp_path / "home/runs/x/metrics.jsonl"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs\n")
    done = sbatch(*MACHINES, "--submit")
    assert done.returncode == 2 and f"packtrain did not make {theirs}" in done.stderr
    moved = theirs.rename("run.jsonl")
    done = sbatch(*MACHINES, "-o", "run.jsonl")
    assert done.returncode == 2 and "[not-made-by-packtrain]" in done.stderr
    assert moved.read_text() == "theirs\n" and not [*theirs.parent.iterdir()]
    assert not (tmp_path / "called").exists()


def test_a_submission_from_inside_a_job_does_not_hand_that_jobs_numbers_on(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/here.conf")
    assert sbatch(*MACHINES, "--submit").returncode == 0
    _, _, env = json.loads((tmp_path / "called").read_text())
    assert "SLURM_MEM_PER_NODE" not in env and env["SLURM_CONF"] == "/etc/here.conf"


def test_a_machine_without_slurm_and_a_refusal_of_sbatch_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSES", "invalid partition specified: x")
    done = sbatch(*MACHINES, "--submit", "topology.sbatch=['-p x']")
    assert done.returncode == 2
    assert "topology: sbatch refuses the job: invalid partition specified: x" in done.stderr
    assert list(Path("runs/x/logs").iterdir()) == []
    monkeypatch.setenv("PATH", "/nowhere")
    done = sbatch(*MACHINES, "--submit")
    assert done.returncode == 2 and "[no-sbatch]" in done.stderr
    assert sbatch(*MACHINES).returncode == 0


def test_gpus_are_read_from_the_options_of_sbatch() -> None:
    for line, gpus in {
        "--gres=gpu:8": 8,
        "--gres=gpu:h100:8,nvme:1": 8,
        "--gres nvme:1": None,
        "--gres=gpu": None,
        "--gres=gpu:2(S:0)": 2,
        "--gres=none": 0,
        "--gpus-per-node=a100:4": 4,
        "--gpus=16": None,
        "--mem=0": None,
        "--gres='gpu:8": None,
    }.items():
        assert count_gpus(Topology(sbatch=[line])) == gpus, line


VARIANTS = [
    [],
    ["topology.requeue=true"],
    [*SWEEP, "topology.requeue=true"],
    [*SWEEP, *RESTARTED],
    SWEEP,
    ["topology.command='apptainer exec --bind=\"$PWD\" a.sif packtrain'", "topology.setup=['module load a']"],
    ["topology.command='~/v/bin/packtrain'", "topology.setup=['export A=1','true']", "topology.sbatch=['--mem=0']"],
]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing_in_scripts_and_templates(tmp_path: Path) -> None:
    files = list(TEMPLATES)
    for number, given in enumerate(VARIANTS):
        files.append(tmp_path / f"{number}.sbatch")
        files[-1].write_text(script(*given))
    done = subprocess.run(["shellcheck", *map(str, files)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_each_template_starts_packtrain_once_on_every_machine_and_fits_a_page() -> None:
    names = {"1-node-8-gpus", "N-nodes-8-gpus", "infiniband", "ethernet", "container-pyxis", "container-apptainer"}
    assert {file.stem for file in TEMPLATES} == names
    for file in TEMPLATES:
        assert "--ntasks-per-node=1" in file.read_text() and 'packtrain sft "$@"' in file.read_text()
        assert all(len(line) <= 128 for line in file.read_text().splitlines())


def test_the_commands_of_the_page_about_slurm_run_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.read_text()
    (tmp_path / "home/topology").mkdir()
    Path("topology/cluster.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    Path("run.yaml").write_text("model: {path: o/m}\ndata: {train: o/d}\nbatch: {examples_per_step: 64}\n")
    commands = [block.split("```")[0].strip() for block in page.split("```bash\n")[1:]]
    assert len(commands) == 3
    for command in commands:
        done = packtrain(*shlex.split(command.replace("\\\n", ""))[1:], folder=Path.cwd())
        assert done.returncode == 0, done.stderr
    assert "#SBATCH --mem=0\n" in json.loads((tmp_path / "called").read_text())[1]
