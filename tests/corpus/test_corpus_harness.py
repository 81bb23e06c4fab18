"""The corpus can fail: each thing that it asks of a case is broken once here, and named."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.corpus.case import Case, check

PLANTED = {
    "import sys; print('the key is hunter2hunter2', file=sys.stderr)": "a secret is in stderr",
    "import os; os.mkdir('run'); open('run/log', 'w').write('hunter2hunter2')": "a secret is in run/log",
    "import os; os.remove('notes.txt')": "notes.txt was lost",
    "open('notes.txt', 'w').write('changed')": "notes.txt was changed",
    "open('stray', 'w')": "stray was made",
    "raise RuntimeError('a bug')": "a traceback",
    "while True: pass": "it did not end within 1 s",
}


@pytest.mark.parametrize("code", PLANTED)
def test_what_a_case_must_not_do_is_told(code: str, tmp_path: Path) -> None:
    files = {"notes.txt": "mine", "c.yaml": "optim: {beta1: x}"}
    planted = {"begin": partial(exec, code), "secrets": ("hunter2hunter2",), "limit_s": 1}
    case = Case(name="planted", arguments=("plan", "c.yaml"), files=files, **planted)
    with pytest.raises(AssertionError) as failure:
        check(case, tmp_path)
    assert PLANTED[code] in str(failure.value)
    assert "$ packtrain plan c.yaml" in str(failure.value)


def test_a_case_may_expect_another_end(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit code 2, not 0"):
        check(Case(name="planted", arguments=("plan", "none.yaml"), expect=(0,)), tmp_path)
    with pytest.raises(AssertionError, match="it does not say 'no such thing'"):
        check(Case(name="planted", arguments=("plan", "none.yaml"), says=("no such thing",)), tmp_path / "again")
