"""`python -m packtrain` is `packtrain`. The launcher starts `python -m packtrain worker VERB CONFIG_YAML` once per device."""

from __future__ import annotations

import sys


def _work() -> int:
    from packtrain.cli import work
    from packtrain.config.compose import load_config

    verb, config = sys.argv[-2:]
    return work(verb, load_config(config, []))


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        from packtrain.launch.worker import run_worker

        run_worker(_work)
    else:
        from packtrain.cli import main

        main()
