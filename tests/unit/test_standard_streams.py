"""What a run prints does not end it."""

from __future__ import annotations

import subprocess
import sys
import time

SHARED = """
import os
from packtrain.standard_streams import outlive_terminal
outlive_terminal()
os.set_blocking(1, False)
for number in range(3000):
    print("x" * 100, number)
"""


def test_a_slow_reader_is_waited_for_on_a_pipe_that_another_process_made_non_blocking() -> None:
    writer = subprocess.Popen([sys.executable, "-c", SHARED], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    time.sleep(1)  # the pipe is full
    assert len(writer.stdout.readlines()) == 3000
    assert writer.wait() == 0
