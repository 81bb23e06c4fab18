"""What others raise is the user's, what packtrain raises by mistake stays a bug, whatever Python's own code lies between."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import packtrain
from packtrain.errors import BUG, TRACEBACK, UserError, boundary, exit_code_of, explain

OURS, THEIRS = str(Path(packtrain.__file__)), "/site-packages/library/loading.py"


def raised_by(file: str, code: str) -> None:
    exec(compile(code, file, "exec"), {})


@pytest.mark.parametrize("code", ["None + 1", "{}['a']", "import re; re.search('a', 5)"])
def test_a_bug_of_packtrain_is_told_from_one_of_a_library(code: str) -> None:
    with pytest.raises((TypeError, KeyError)), boundary("cannot load it", "model.path"):
        raised_by(OURS, code)
    said = r"model\.path: cannot load it: (TypeError|KeyError): "
    with pytest.raises(UserError, match=said), boundary("cannot load it", "model.path"):
        raised_by(THEIRS, code)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import json; json.loads('{')", "cannot load it: Expecting property name"),
        ("import sys; sys.exit(0)", "its code ended the process, by sys.exit"),
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


DISK_FULL = "raise OSError(28, 'No space left on device', 'a')"
NOT_THERE, DEEP, NO_TEXT = "open('/nowhere/a')", "f = lambda: f(); f()", "b'\\xff'.decode()"


@pytest.mark.parametrize(
    "code", [NOT_THERE, "import os; os.makedirs('/dev/null/a/b')", DEEP, NO_TEXT, "'é'.encode('ascii')"]
)
def test_of_what_no_stage_expected_our_own_failure_is_a_bug_and_that_of_a_library_is_not(code, capsys, monkeypatch):
    monkeypatch.delenv(TRACEBACK, raising=False)
    assert exit_code_of(lambda: raised_by(OURS, code)) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said and said.endswith(f"{BUG}\n")
    assert exit_code_of(lambda: raised_by(THEIRS, code)) == 2
    assert "Traceback" not in (said := capsys.readouterr().err) and TRACEBACK in said
    monkeypatch.setenv(TRACEBACK, "1")
    assert exit_code_of(lambda: raised_by(THEIRS, code)) == 2
    assert capsys.readouterr().err.startswith("Traceback")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (DISK_FULL, "a: No space left on device"),
        ("raise OSError(122, 'Disk quota exceeded', b'a', None, 'b')", "quota"),
        ("open('x' * 300)", "File name too long"),
        ("open('\\ud800')", "surrogates"),
        ("import numpy.no_such_part", "a package cannot be used: No module named 'numpy.no_such_part'"),
        ("raise MemoryError", "there is not enough memory"),
        ("raise OSError(12, 'Cannot allocate memory')", "Cannot allocate memory"),
    ],
)
def test_what_the_machine_refuses_is_the_users_whoever_asks(code: str, said: str) -> None:
    for file in (OURS, THEIRS):
        with pytest.raises(Exception) as error:
            raised_by(file, code)
        found = explain(error.value)
        assert isinstance(found, UserError) and said in str(found)


@pytest.mark.parametrize(
    ("code", "alone", "among_others"),
    [
        ("from packtrain.errors import no_such_name", 1, 1),
        (DISK_FULL, 2, 2),
        ("raise OSError(24, 'Too many open files')", 2, 2),
        ("raise OSError(5, 'Input/output error')", 2, 1),  # may be of one machine: the run is started again
        ("raise ConnectionResetError", 4, 1),  # a lost peer, of which the launcher knows more
        ("{}['a']", 1, 1),
    ],
)
def test_what_the_machine_refuses_is_no_bug_in_one_of_many_processes_either(code, alone, among_others, capsys):
    assert exit_code_of(lambda: raised_by(OURS, code)) == alone
    capsys.readouterr()
    assert exit_code_of(lambda: raised_by(OURS, code), alone=False) == among_others
    assert ("Traceback" in (said := capsys.readouterr().err)) == (among_others == 1) and BUG not in said


def test_others_do_not_end_the_process_but_children_and_packtrain_do() -> None:
    def child(file: str) -> int:
        if not (number := os.fork()):
            raised_by(file, "import os; os._exit(7)")
        return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])

    def work() -> int:
        assert child(THEIRS) == 7
        raised_by(THEIRS, "import os; os._exit(0)")
        return 0

    leave = os._exit
    assert exit_code_of(work) == 2 and os._exit is leave
    assert exit_code_of(lambda: child(OURS)) == 7
