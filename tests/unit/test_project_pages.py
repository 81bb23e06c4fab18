"""The repository's forms are valid, and its pages name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from check_jsonschema import main
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
FORMS = ROOT / ".github/ISSUE_TEMPLATE"
SCHEMAS = {
    "github-issue-forms": [*FORMS.glob("[!c]*.yml")],
    "github-issue-config": [FORMS / "config.yml"],
    "dependabot": [ROOT / ".github/dependabot.yml"],
    "citation-file-format": [ROOT / "CITATION.cff"],
}


def paths_in(text: str) -> set[str]:
    """Return the words in backticks that have a slash or the ending of a file."""
    words = re.findall(r"`([\w./-]+)`", text)
    return {word for word in words if "/" in word or re.search(r"\.(md|py|toml|yaml|yml|lock|sh|txt)$", word)}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_github_reads_the_forms(schema: str) -> None:
    assert SCHEMAS[schema]
    files = [str(file) for file in SCHEMAS[schema]]
    checked = CliRunner().invoke(main, ["--builtin-schema", f"vendor.{schema}", *files])
    assert checked.exit_code == 0, checked.output


def test_a_form_without_a_body_is_refused(tmp_path: Path) -> None:
    form = yaml.safe_load((FORMS / "bug.yml").read_text())
    del form["body"]
    (tmp_path / "bug.yml").write_text(yaml.safe_dump(form))
    given = ["--builtin-schema", "vendor.github-issue-forms", str(tmp_path / "bug.yml")]
    assert CliRunner().invoke(main, given).exit_code == 1


@pytest.mark.parametrize("form", ["bug.yml", "model.yml"])
def test_a_form_for_faults_requires_the_machine(form: str) -> None:
    (asked,) = [one for one in yaml.safe_load((FORMS / form).read_text())["body"] if one["id"] == "env"]
    assert asked["attributes"]["label"] == "packtrain env --json" and asked["validations"]["required"]
    assert "packtrain env --json" in (ROOT / ".github/pull_request_template.md").read_text()


def test_the_page_for_agents_is_short_and_every_path_in_it_is_there() -> None:
    text = (ROOT / "AGENTS.md").read_text()
    assert len(text.splitlines()) <= 60
    paths = paths_in(text) | set(re.findall(r"(?:recipes|tests)/[\w/-]+\.\w+", text))
    assert len(paths) > 15
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", ["AGENTS.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md"])
def test_links_of_other_pages_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text())
    assert [one for one in links if "://" not in one and not (ROOT / one.split("#")[0]).exists()] == []


def test_hooks_before_a_commit_run_the_ruff_of_the_tests() -> None:
    (bound,) = re.findall(r'^ +"(ruff[<>=][^"]*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    taken = [one for hook in repository["hooks"] for one in hook.get("additional_dependencies", [])]
    assert set(taken) == {bound}
