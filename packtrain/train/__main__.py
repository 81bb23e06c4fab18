"""`python -m packtrain.train VERB CONFIG_YAML`: what the launcher starts, once per device."""

from __future__ import annotations

import sys

from packtrain.launch.worker import run_worker


def _work() -> int:
    from packtrain.config.compose import load_config
    from packtrain.train.run import train

    verb, config = sys.argv[1:]
    return train(verb, load_config(config, []))


if __name__ == "__main__":
    run_worker(_work)
