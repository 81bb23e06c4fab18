"""Secrets in configs, arguments and variables: whatever is wrong with them, they are not printed and not written."""

from __future__ import annotations

from collections.abc import Iterator

from tests.corpus.case import Case, command, each_of

SECRETS = {
    "a token of the hub": "hf_AbCdEfGhIjKlMnOpQrStUvWx",
    "a key of OpenAI": "sk-proj-abcdefghijklmnopqrstuvwx",
    "a token of GitHub": "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "an id of AWS": "AKIAIOSFODNN7EXAMPLE",
    "a JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    "a key of wandb": "0123456789abcdef0123456789abcdef01234567",
    "a password in a URL": "https://joe:hunter2hunter2@host/x.jsonl",
    "a password with a slash": "https://joe:hunter2/hunter2@host/x.jsonl",
    "a signed URL": "https://host/x.jsonl?X-Amz-Signature=hunter2hunter2",
    "a private key": "-----BEGIN RSA PRIVATE KEY-----hunter2hunter2-----END RSA PRIVATE KEY-----",
}
PARTS = ("hunter2", "AbCdEfGhIj", "abcdefghij", "AKIAIOSF", "eyJzdWIi", "89abcdef01")
"""Of each a part that must be seen nowhere."""
RUN = {"model.path": "owner/model", "data.train": "owner/data"}
RUN |= {"batch.examples_per_step": "32", "trainer.output_dir": "run"}
PLACES = ("model.path", "data.train", "data.cache_dir", "trainer.output_dir", "tracking.run_name", "model.config.name")
MAY_BE_A_COMMIT = ("trainer.output_dir", "data.cache_dir", "tracking.run_name")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
JOB = ("topology.nodes=1", "topology.gpus_per_node=1", "topology.sbatch=['-c 1']")


def given(**changed: str) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in {**RUN, **changed}.items())


def of_the_config() -> Iterator[Case]:
    """Each secret at each place, in a file and on the command line: refused without being repeated."""
    for what, secret in SECRETS.items():
        for at, place in enumerate(PLACES):
            if what == "a key of wandb" and place in MAY_BE_A_COMMIT:
                continue
            group, _, name = place.partition(".")
            value = f"{{name: '{secret}'}}" if name.count(".") else f"'{secret}'"
            text = f"{group}:\n  {name.partition('.')[0]}: {value}\n"
            others = [one for one in given() if not one.startswith(f"{place}=")]
            in_file = at % 2 == len(secret) % 2  # every second one
            files, given_by = ({"c.yaml": text}, "c.yaml") if in_file else ({}, f"+{place}='{secret}'")
            yield command(f"{what} in {place}", "plan", given_by, *others, files=files, secrets=PARTS)


ARGUMENTS = {
    "an option": ("plan", *given(), "--hf-token=hunter2hunter2"),
    "a key that is not there": ("plan", *given(), "wandb.api_key=hunter2hunter2"),
    "a value that cannot be read": ("plan", *given(), "trainer.password=[hunter2hunter2"),
    "a group's value": ("plan", *given(), "peft.token={a: hunter2hunter2}"),
    "the config's name": ("plan", "https://joe:hunter2hunter2@host/c.yaml"),
    "a verb": ("--token=hunter2hunter2",),
    "one of two run folders": ("doctor", "https://joe:hunter2/hunter2@host/run"),
    "too many run folders": ("doctor", "run", "--password=hunter2hunter2"),
    "a file for a page": ("inspect", *given(), "--html", "x?token=hunter2hunter2/a"),
    "a file for a script": ("sbatch", "sft", *given(), *JOB, "-o", "none/token=hunter2hunter2/a"),
    "a variable of the run": ("plan", *given(), "+topology.environment.MY_TOKEN=hunter2hunter2"),
    "an option of sbatch": ("sbatch", "sft", *given(), *JOB, "topology.sbatch=['--export=A_TOKEN=hunter2hunter2']"),
    "a command of a job": ("sbatch", "sft", *given(), *JOB, "topology.command='env A_TOKEN=hunter2hunter2 packtrain'"),
    "a key that was removed": ("plan", *given(), "topology.container='docker://me:hunter2hunter2@example.org/x'"),
    "a label of a column": ("plan", *given(), "data.columns={password: 'https://joe:hunter2hunter2@h'}"),
    "a password that the next problem names": (
        *("plan", *given(**{"data.train": "https://joe:hunter2/hunter2@host/x.jsonl"})),
        "data.eval=https://joe:hunter2/hunter2@host/y.jsonl",
    ),
}
FROM_ENV = ("tracking.run_name", "trainer.output_dir", "data.train", "model.path", "data.cache_dir")
SETUP = "topology:\n  setup: ['export WANDB_API_KEY=hunter2hunter2', 'git clone https://joe:hunter2hunter2@host/x']\n"
A_RUN = {
    "run/.packtrain": "",
    "run/config.yaml": "tracking: {run_name: 'https://joe:hunter2hunter2@h'}\n",
    "run/summary.json": '{"status": "failed", "steps": 3, "hub_token": "hunter2hunter2"}',
    "run/logs/rank-00000.log": "error:\nhttps://joe:hunter2hunter2@h is not there\nHF_TOKEN=hunter2hunter2\n",
    "run/logs/ranks.json": '{"ranks": []}',
    "run/logs/diagnosis.txt": "rank 0 waits for https://joe:hunter2hunter2@h\n",
    "run/metrics.jsonl": '{"step": 1, "loss": 2.0}\n',
}
CASES = [
    *of_the_config(),
    *(command(f"in arguments: {name}", *given, secrets=("hunter2",)) for name, given in ARGUMENTS.items()),
]
for place in MAY_BE_A_COMMIT:
    own = given(**{place: f"'{COMMIT}'"})
    CASES.append(command(f"not hostile: {place} called by a commit", "plan", *own, expect=(0,), writes=(COMMIT,)))
ROW = {f"{COMMIT}/a.jsonl": '{"text": "a b c"}\n'}
in_commit = given(**{"data.train": f"'{COMMIT}'"})
CASES.append(command("not hostile: data in a folder called by a commit", "plan", *in_commit, files=ROW, expect=(0,)))
for place in FROM_ENV:
    group, name = place.split(".")
    others = [one for one in given() if not one.startswith(f"{place}=")]
    for variable in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        files = {"c.yaml": f"{group}:\n  {name}: 'x-${{oc.env:{variable}}}'\n"}
        how = {"env": {variable: "plain-hunter2-value"}, "secrets": ("hunter2",), "says": (place,)}
        CASES.append(command(f"{variable} by oc.env in {place}", "plan", "c.yaml", *others, files=files, **how))
CASES += [
    command(
        "a variable of a secret name with a value of every day",
        *("plan", *given(**{"trainer.output_dir": "runs/training-1"})),
        env={"POSTGRES_PASSWORD": "training"},
        says=("the value of $POSTGRES_PASSWORD", "trainer.output_dir"),
    ),
    command(
        "in topology.setup: plan",
        *("plan", "c.yaml", *given(), "--full"),
        files={"c.yaml": SETUP},
        secrets=("hunter2",),
        expect=(0,),
        says=("topology.setup[0]", "topology.setup[1]"),
    ),
    command(
        "in topology.setup: the script has it",
        *("sbatch", "sft", "c.yaml", *given(), *JOB),
        files={"c.yaml": SETUP},
        writes=("run", "run/*"),
        expect=(0,),
        says=("export WANDB_API_KEY=hunter2hunter2", "note: topology.setup[0]: it has a secret"),
    ),
    *(
        command(f"in a run folder: {verb}", verb, "run", files=A_RUN, secrets=("hunter2",), expect=(0, 4))
        for verb in ("report", "doctor")
    ),
]
test_case = each_of(CASES, one_in=3)
