"""Sentences and variable names stay easy to read. `python -m tests.tidy.prose` lists the findings."""

from pathlib import Path

import pytest
from tests.tidy import prose

EXCEPTIONS = Path(__file__).with_name("prose_exceptions.txt")
# May only shrink. Rewrite a sentence rather than adding an exception for it.
EXCEPTIONS_MAX = 184


def exceptions() -> set[tuple[str, str, str]]:
    """Returns the excepted findings as (file, rule, text). Lines that start with # give reasons."""
    lines = EXCEPTIONS.read_text(encoding="utf-8").splitlines()
    rows = [line.split(" | ", 2) for line in lines if line and not line.startswith("#")]
    return {(file, rule, text) for file, rule, text in rows}


def test_every_sentence_follows_the_rules() -> None:
    findings = {
        (row.file, row.rule, row.text): row.line for row in prose.check(prose.ROOT, prose.ROOTS)
    }
    advice = {rule.name: rule.advice for rule in prose.RULES} | {"name": prose.NAME_ADVICE}
    allowed = exceptions()
    problems = [
        f"{file}:{line}: {rule}: {text}\n    {advice[rule]}"
        for (file, rule, text), line in findings.items()
        if (file, rule, text) not in allowed
    ]
    assert problems == [], "\n".join(problems)
    assert allowed - set(findings) == set(), "remove these exceptions: their texts are gone"


def test_the_list_of_exceptions_only_shrinks() -> None:
    assert len(exceptions()) <= EXCEPTIONS_MAX


@pytest.mark.parametrize(
    ("kind", "text", "rule"),
    [
        (prose.DOCSTRING, "Of one moment, to one tenant.", "fragment"),
        (prose.COMMENT, "Files from what a killed worker left.", "what-clause"),
        (prose.MESSAGE, "the asset is used by somebody else", "somebody"),
        (prose.DOCS, "The worker is told to stop.", "speech"),
        (prose.UI, "Mend the problems first.", "word"),
        (prose.MESSAGE, "{kind} is no type of input", "is-no"),
        (prose.COMMENT, "Sorted as the index has it.", "as-has"),
        (prose.DOCS, "Only the creator may.", "bare-ending"),
        (prose.DOCSTRING, "Seconds between calls. None: never.", "none-colon"),
        (prose.DOCS, "The load of the machine of the worker.", "of-chain"),
        (prose.DOCS, "A port is shown that is not wired.", "late-relative"),
        (prose.DOCS, "A lease ends; then the job is queued.", "colon-clause"),
        (prose.CLI, "Print the id also when nothing was created.", "also-when"),
        (prose.MESSAGE, "a name is needed for {kind}", "message"),
        (prose.DOCSTRING, "Returns the least busy server. The first one wins a tie.", None),
    ],
)
def test_each_rule_finds_its_pattern(kind: str, text: str, rule: str | None) -> None:
    assert (rule in prose.check_text(kind, text)) if rule else prose.check_text(kind, text) == []


def test_unclear_variable_names_are_found(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        "for each in jobs:\n    found = each.id\n", encoding="utf-8"
    )
    (tmp_path / "page.ts").write_text(
        "const told = jobs.map((each) => each.id)\n", encoding="utf-8"
    )
    findings = prose.check(tmp_path, [tmp_path])
    assert [(row.file, row.line, row.text) for row in findings] == [
        ("module.py", 1, "each"),
        ("module.py", 2, "found"),
        ("page.ts", 1, "told"),
        ("page.ts", 1, "each"),
    ]
