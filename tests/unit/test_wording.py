"""Nothing secret comes through the redactor, and little else is lost in it; no text acts on the terminal that shows it."""

from __future__ import annotations

import pytest

from packtrain.config.keys import keys
from packtrain.wording import Redactor, speaks_of_secrets, visible

SECRET = "s3cr3t-9f8e7d"


@pytest.mark.parametrize(
    "text",
    [
        f"https://joe:{SECRET}@host/path",
        f"http://joe:p@{SECRET}@proxy:3128",
        f"http://joe:a/{SECRET}@proxy:3128",
        f"git+https://{SECRET}@github.com/owner/name.git",
        f"WANDB_API_KEY={SECRET} python train.py",
        f"['export AWS_SECRET_ACCESS_KEY={SECRET}', 'x']",
        f"{{'hf_token': '{SECRET}'}}",
        f'"password": "{SECRET} with spaces"',
        f'{{"auth": {{"user": "me", "pw": "{SECRET}"}}}}',
        f"environment:MLFLOW_TRACKING_PASSWORD={SECRET}",
        f"python train.py --hub-token {SECRET} --lr 1",
        f"https://x.blob.core.windows.net/c?sv=2024&sig={SECRET}%3D&se=1",
        f"https://b.s3.amazonaws.com/x?X-Amz-Expires=3&X-Amz-Signature={SECRET}",
        f"Authorization: {SECRET}",
        "hf_AbCdEfGhIjKlMnOpQrSt",
        "Bearer abcdef0123456789",
        "sk-proj-abcdefghijklmnopqrstuvwxyz",
        "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
        "0123456789abcdef0123456789abcdef01234567",
    ],
)
def test_what_looks_secret_is_hidden_wherever_it_stands(text: str) -> None:
    shown = Redactor().text(text)
    assert "***" in shown
    hidden = (SECRET, "AbCdEf", "abcdef", "eyJzdWI", "456789abc")
    assert not any(one in shown for one in hidden), shown


@pytest.mark.parametrize(
    "text",
    [
        "tokenizers: 0.23.3",
        "data.train=/data/hf_datasets/a.jsonl trainer.output_dir=hf_transformers_run1",
        "sk-en-parallel-corpus-v2-cleaned.jsonl, pypi-descriptions-cleaned-v3.jsonl, npm_package_readmes_2024",
        "num_key_value_heads=8, linear_num_key_heads: 4, total_tokens=5, image_token_index: 3",
        "batch.tokens_per_step=4096, max_new_tokens: 64",
        "Platform: Linux-6.8.0-x86_64-with-glibc2.39",
        "TRL version: 1.16.0+0123456",
        "GPU-0123abcd-aaaa-bbbb-cccc-0123456789ab",
        "torch 2.13.0 for CUDA 12.8",
        "/home/me/models--x/snapshots/0123456789abcdef0123456789abcdef01234567",
        "export CUDA_VISIBLE_DEVICES=1,2; pip install 'torch>=2.10'",
        "pip install torch --index-url https://download.pytorch.org/whl/cu126",
    ],
)
def test_what_is_no_secret_stays_as_it_is(text: str) -> None:
    assert Redactor().text(text) == text


def test_secrets_of_the_environment_and_everything_below_a_secret_key_are_hidden_in_other_places_too() -> None:
    named = {"MY_TOKEN": SECRET, "API_KEY": "short", "TOKENIZERS_PARALLELISM": "false"}
    redactor = Redactor({**named, "https_proxy": "http://joe:pa/ss-w@proxy:1"})
    shown = redactor.plain({"a": [f"x{SECRET}y"], "b": ("pa/ss-w", "false", "short"), "nothing": None, "number": 3})
    assert shown == {"a": ["x***y"], "b": ["***", "false", "short"], "nothing": None, "number": 3}
    others = {"hub_token": None, "use_auth_token": True, "lr": "1e-5"}
    shown = Redactor().plain({"credentials": {"user": ["me", 1]}, **others})
    assert shown == {"credentials": {"user": ["***", "***"]}, **others}


SPEAK = (
    *("HF_TOKEN", "HF_TOKEN_PROD", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "OPENAI_APIKEY", "AWS_SECRET_ACCESS_KEY"),
    *("AWS_ACCESS_KEY_ID", "DEPLOY_KEY_PROD", "SSH_PRIVATE_KEY", "KEY", "DB_PASS", "pgpassword", "MLFLOW_PASSWD"),
    *("MY_PWD", "SLURM_JWT", "SENTRY_DSN", "GIT_PAT", "HTTP_AUTHORIZATION", "X_AUTH", "SESSION_COOKIE"),
    *("GOOGLE_APPLICATION_CREDENTIALS", "sig", "X-Amz-Signature", "client-secret", "--hub-token", "pw"),
    *("tokenizer_api_key", "tracking.bearer"),
)
DO_NOT = (
    *("MAX_TOKENS", "max_new_tokens", "tokens_per_step", "tokens", "pad_token_id", "tokenizers", "PYTHONPATH"),
    *("TOKENIZERS_PARALLELISM", "PATH", "PWD", "COMPASS_DIR", "BYPASS", "PATTERN", "keyboard", "monkey", "AUTHOR"),
    *("SSH_AUTH_SOCK", "signal"),
    *(
        "add_tokens",
        "add_special_tokens",
        "additional_special_tokens",
        "new_special_tokens_config",
        "added_tokens_overrides",
    ),
)


def test_names_tell_secrets_and_long_texts_take_no_long_time() -> None:
    assert [name for name in SPEAK if not speaks_of_secrets(name)] == []
    assert [name for name in (*DO_NOT, *keys()) if speaks_of_secrets(name)] == []
    for text in ("a:" * 10**5, "--x " * 10**5, "x" * 10**6, "://a:b" * 10**4):
        assert Redactor().text(text)


@pytest.mark.parametrize(
    ("text", "everything", "but_whitespace"),
    [
        ("a\x1b[31mred\x00\x7f", "a␛[31mred␀␡", "a␛[31mred␀␡"),
        ("one\ttwo\nthree\r\n", "one␉two⏎\nthree␍⏎\n", "one\ttwo\nthree␍\n"),
        ("\u202eevil\ud800\u200b\x9b", "⟨U+202E⟩evil⟨U+D800⟩⟨U+200B⟩⟨U+009B⟩", "⟨U+202E⟩evil⟨U+D800⟩⟨U+200B⟩⟨U+009B⟩"),
        ("5\xa0km, ünï – 漢字\u3000🙂", "5⍽km, ünï – 漢字\u3000🙂", "5\xa0km, ünï – 漢字\u3000🙂"),
    ],
)
def test_what_acts_or_hides_is_shown_as_a_symbol(text: str, everything: str, but_whitespace: str) -> None:
    assert (visible(text), visible(text, whitespace=True)) == (everything, but_whitespace)
