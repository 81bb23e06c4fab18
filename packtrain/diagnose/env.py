"""`packtrain env [CONFIG]`: what this machine is and has, and whether that will do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from packtrain.config.schema import RunConfig
from packtrain.diagnose.checks.all import check_all
from packtrain.diagnose.env_view import print_report, report_json
from packtrain.diagnose.facts.gather import gather
from packtrain.diagnose.redact import Redactor
from packtrain.errors import CheckFailed


def show_environment(load: Callable[[], RunConfig | None], *, as_json: bool) -> int:
    """Prints the report of this machine, for the run whose config `load` returns; returns the exit code."""
    facts, needs = gather(load)
    checks = check_all(facts, needs)
    redactor = Redactor(os.environ, needs.environment)
    if as_json:
        print(json.dumps(report_json(facts, needs, checks, redactor), indent=2))
    else:
        print_report(facts, needs, checks, redactor)
    return CheckFailed.exit_code if any(check.status == "fail" for check in checks) else 0
