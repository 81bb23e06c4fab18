"""What others raise is the user's, what packtrain raises by mistake stays a bug, whatever Python's own code lies between."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path

import pytest

import packtrain
from packtrain.boundary import boundary, staying
from packtrain.errors import CheckFailed, UserError
from packtrain.run_limits import limited

OURS, THEIRS = str(Path(packtrain.__file__)), "/site-packages/library/loading.py"


def raised_by(file: str, code: str) -> None:
    exec(compile(code, file, "exec"), {})


@pytest.mark.parametrize("code", ["None + 1", "{}['a']", "import re; re.search('a', 5)"])
def test_a_bug_of_packtrain_is_told_from_one_of_a_library(code: str) -> None:
    with pytest.raises((TypeError, KeyError)), boundary("cannot load it", "model.path"):
        raised_by(OURS, code)
    with (
        pytest.raises(UserError, match=r"model\.path: cannot load it: (TypeError|KeyError): "),
        boundary("cannot load it", "model.path"),
    ):
        raised_by(THEIRS, code)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import json; json.loads('{')", "cannot load it: Expecting property name"),
        ("import sys; sys.exit(0)", "its code ended the process, by sys.exit"),
        ("import os; os._exit(0)", "its code ended the process, by sys.exit"),
        ("open('/nowhere/a')", "No such file or directory: /nowhere/a"),
        ("raise BaseException('base')", "cannot load it: base"),
        ("raise ValueError", "cannot load it: ValueError"),
    ],
)
def test_whatever_others_do_is_told_in_a_sentence_with_a_fix(code: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as error, boundary("cannot load it", fix="Mend it."):
        raised_by(OURS, code)
    assert error.value.problems[0].fix == "Mend it."
    assert error.value.__cause__ is not None


def test_what_is_for_the_user_already_and_ctrl_c_pass() -> None:
    for kind in (CheckFailed("it leaks"), KeyboardInterrupt()):
        with pytest.raises(type(kind)), boundary("cannot load it"):
            raise kind


def test_children_may_leave() -> None:
    with staying():
        child = os.fork()
        if not child:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_programs_of_the_user_have_little_time_and_memory() -> None:
    with (
        pytest.raises(UserError, match="this loop computes for more than"),
        limited("this loop", "here", "", seconds=0.05),
    ):
        while True:
            pass
    with pytest.raises(UserError, match="this text takes more than 1 GiB"), limited("this text", "here", ""):
        "a" * (1 << 34)


def test_other_busy_threads_take_nothing_of_that_time() -> None:
    text, done = bytes(1 << 22), threading.Event()

    def be_busy() -> None:
        while not done.is_set():
            hashlib.sha256(text)  # lets the others compute meanwhile

    threads = [threading.Thread(target=be_busy, daemon=True) for _ in range(4)]
    for one in threads:
        one.start()
    try:
        with limited("this loop", "here", "", seconds=0.3):
            until = time.thread_time() + 0.2
            while time.thread_time() < until:
                pass
    finally:
        done.set()
        for one in threads:
            one.join()
