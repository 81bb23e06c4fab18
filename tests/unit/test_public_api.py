"""What `from packtrain import …` promises: names, signatures, examples that run, types, and that the command does not wait for it."""

from __future__ import annotations

import doctest
import importlib
import inspect
import subprocess
import sys
from importlib.resources import files

import pytest

import packtrain

SIGNATURES = {
    "attach": "(trainer_or_model, *, tokens_per_row=None, share_prefix='auto', proof=True)",
    "dither_weights": "(model, *, seed=0)",
    "pack": "(lengths, tokens_per_row, *, strategy='best_fit', seed=0)",
    "PackedCollator": "(return_flash_attn_kwargs=False, return_seq_idx=False, return_segments=True)",
    "Segments": "(lengths, prefixes=(), blocks=(), two_way=TwoWay(in_global_layers=True, beyond_window=False), pictures=())",
}
"""Without their types."""
DOCUMENTED = ("library.attach", "library.collator", "packing.prefixes", "packing.segments")
"""Modules whose docstrings have examples."""


def test_the_names_and_their_arguments_are_those_that_scripts_rely_on() -> None:
    assert sorted(packtrain.__all__) == sorted(SIGNATURES)
    assert {*packtrain.__all__} <= {*dir(packtrain)}
    for name, expected in SIGNATURES.items():
        parameters = inspect.signature(getattr(packtrain, name)).parameters.values()
        bare = [one.replace(annotation=inspect.Parameter.empty) for one in parameters]
        assert str(inspect.Signature(bare)) == expected, name
        assert all(one.annotation is not inspect.Parameter.empty for one in parameters), f"{name} is typed"
        assert inspect.getdoc(getattr(packtrain, name))
    assert (files("packtrain") / "py.typed").is_file()
    with pytest.raises(AttributeError, match="'packtrain' has no attribute 'no_such_name'"):
        _ = packtrain.no_such_name  # type: ignore[attr-defined]


def test_python_and_the_command_do_not_wait_for_torch_until_a_name_is_used() -> None:
    code = """
import sys, packtrain, packtrain.cli
assert not {"torch", "transformers", "numpy"} & {*sys.modules}
from packtrain import Segments
assert "torch" in sys.modules and "transformers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", DOCUMENTED)
def test_examples_in_docstrings_say_what_comes_out(name: str) -> None:
    ran = doctest.testmod(importlib.import_module(f"packtrain.{name}"))
    assert ran.failed == 0 and (ran.attempted or name == "library.attach")
