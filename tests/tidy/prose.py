"""Finds sentences and variable names that a native reader would stumble over.

    python -m tests.tidy.prose                         everything, with a count per rule
    python -m tests.tidy.prose src/comfyfleet/cli      a folder or a file

It reads docstrings, comments (Python and TypeScript), error and log messages, CLI help, the texts
of the web pages (web/src/words/en) and the sentences of Markdown files. The rules are regular
expressions. About one finding in six is a false alarm, and about half of the awkward sentences
pass unnoticed, so a text without findings isn't necessarily clear.
"""

import ast
import collections
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

DOCSTRING, COMMENT, MESSAGE, CLI, UI, DOCS, NAME = (
    "docstring",
    "comment",
    "message",
    "cli",
    "ui",
    "docs",
    "name",
)
PROSE = frozenset({DOCSTRING, COMMENT, MESSAGE, CLI, UI, DOCS})
CODE = frozenset({DOCSTRING, COMMENT})
SHORT = frozenset({MESSAGE, CLI, UI})


class Rule(NamedTuple):
    name: str
    kinds: frozenset[str]
    pattern: re.Pattern[str]
    advice: str


def make_rule(name: str, kinds: frozenset[str], advice: str, *alternatives: str) -> Rule:
    return Rule(
        name,
        kinds,
        re.compile("|".join(f"(?:{pattern})" for pattern in alternatives), re.IGNORECASE),
        advice,
    )


# A noun clause with "what" is fine in "decides what to run". It is slow as the subject of a sentence, and in place of a
# noun: "files left by a killed worker" reads faster.
CLAUSE = (
    r"(?:is|are|was|were|has|have|had|it|they|a|an|the|its|their|this|these|each|can|can't|cannot|may|must|does|doesn't|do|did|"
    r"comes?|came|goes|nobody|no|one|jobs?|workers?|nodes?|customers?|clients?|users?|runs?)"
)
BEFORE_CLAUSE = (
    r"(?:^|[;:,.(] ?|\b(?:and|or|of|from|with|by|than|for|as|to|is|are|in|on|against|behind|like|but|holds|has|have|needs?|"
    r"keeps?|tells?|says?|knows?|takes?|makes?|does|sets?|gets?|sees?|returns|adds|reads|finds|drops|deletes|removes|sends|after) )"
)
BARE = r"(?:may|must|can|does|has|have|do|doesn't|don't|isn't|is|are|was|so|anew|stays?|each|too|since)"

RULES = [
    make_rule(
        "fragment",
        frozenset({DOCSTRING}),
        "Start with a verb (Returns, Checks whether) or a noun phrase with an article.",
        r"^(?:Of|As|By|To|With|Without|From|In|On|Over|Until|Like|Only|Also|Nothing|Nobody|None|Its|Their|Those|Each|Who|Whose|"
        r"Whoever|Which|Where|What|That|Else|So|But|Found|Made|Kept|Taken|Told|Said|Given|Asked|Left|Again)\b",
        r"^For (?!example)\b",
        r"^All (?:that|of)\b|^One (?:for|of|that|with|after|per|who)\b",
        r"^The (?:last|first|newest|oldest|same|others?|rest)\b[^.]{0,25}[.;]",
    ),
    make_rule(
        "fragment",
        frozenset({COMMENT}),
        "Start with the subject or with a verb; name the thing that the comment is about.",
        r"^(?:Of|Its|Their|Those|Who|Whose|Whoever|What|By (?!default)|Made|Told|Said|Asked|Kept|Given|Taken)\b",
        r"^As (?:it|they|the|an?|[A-Z]\w+|\w+) (?:\w+ )?(?:says?|has|have|does|do|is|are|it)\b",
        r"^(?:All that|None:|null:)",
        r"^One (?:for|that|with|after|per|who)\b|^To (?:those|whom|whoever|each|all)\b",
        r"^The (?:last|first|newest|oldest|same|others?|rest)[.,;:]?$",
    ),
    make_rule(
        "fragment",
        SHORT,
        "Write a full phrase that makes sense beside its label.",
        r"^(?:Of|Those|Who|Whose|Whoever|What|Else)\b(?!.*\?)",
        r"^(?:Only (?:its|those|on|of|what)|One (?:for|of|that|after|beginning)|All that|The (?:one|ones|item) that)\b",
        r"^(?:Accept|Submit|Take|Make|Start) no\b|^(?:Taken|Given|Made|Told|Said|Left) (?:from|by|back|in|to|of)\b",
    ),
    make_rule(
        "fragment",
        frozenset({DOCS}),
        "Write a full sentence with a subject.",
        r"^`[^`]*`: (?:Of|Those|Who|Whose|What|Its|Only (?:its|those|on|of)|Else|One (?:for|of|that|after))\b",
        r"^(?:Whoever|Who|Those|Of|Found|Made|Kept|Taken|Told|Said|Given|Asked|Left)\b(?!.*\?)|^What\b(?!.*[?:])",
    ),
    make_rule(
        "what-clause",
        PROSE,
        'Name the thing: "files left by a killed worker", not "what a killed worker left".',
        rf"{BEFORE_CLAUSE}what {CLAUSE}\b(?!.*\?$)",
        r"\ball (?:that|of it)\b",
    ),
    make_rule(
        "somebody",
        PROSE,
        "Name the actor: the user, the tenant, an operator, a worker, the caller; or use the passive voice.",
        r"\b(?:whoever|nobody(?:'s)?|somebody(?:'s)?|strangers?)\b",
        r"(?:^|[;:.] )who (?!\w+ \w+\?)(?!.*\?)",
        r"\bthose (?:who|which)\b",
    ),
    make_rule(
        "speech",
        PROSE,
        "Programs don't speak. Write report, send, notify, return, request, show, contain.",
        r"\btold\b|\btells\b|\b(?:is|are|was|were|be) asked\b|\bsays\b|\bsaid\b|\bsay it\b|\bheard\b|\bhears?\b",
        r"\b(?:that|it|worker|server|node|fleet|graph|run|job|page|client|judge|backend) (?:asks|knows|wants)\b",
    ),
    make_rule(
        "word",
        PROSE,
        "Use the standard word: fix, again, continues, in progress, refunded, automatically, next to, remains, finished.",
        r"\bmend(?:s|ed|ing)?\b|\blies?\b|\banew\b|\b(?:go|goes|went|going) on\b|\bunder way\b|\bg(?:ive|ives|iven|ave) back\b",
        r"\bby (?:itself|themselves)\b|\bfor nothing\b|\bbegun\b|\bbegins so\b|\bbeside\b|\bmeanwhile\b|\bonce more\b|\bin force\b",
        r"\bso (?:long|often|many|much)\b(?! (?:as|that|more|of))|\b(?:to|at) its end\b|\blets? go\b|\bmade of\b|\bthe most at once\b",
        r"\b(?:its|their|the|runs|jobs|files|results|and|they|it) stays?\b|\bstays? so\b|\b(?:is|are|was|has) gone\b|\bsilent\b(?! fail)",
        r"\b(?:has|have) it\b|\b(?:is|are) none\b|\bno such\b|\bof (?:yours|ours|theirs)\b|\bfigures\b|\bis cut\b|\bwas cut\b",
        r"\bcan't be (?:taken|meant|told|had|judged|made)\b|\bcan't (?:go on)\b|\bat present\b|(?<!soon )\bas (?:it is|they are)\b(?! (?:not|now))",
        r"\banother one\b|\bneeds of\b|\bleft to (?!right)|(?<!in )\bterms\b(?! of (?:service|use))",
        r"\b(?:came|comes) (?:with|without|late|back|in|too)\b|\b(?:is|are|was|were) (?:meant(?! to| for)|drawn|put)\b|\bhands? out\b",
    ),
    make_rule(
        "is-no",
        PROSE,
        'Write "isn\'t a", "isn\'t supported" or "doesn\'t exist".',
        r"(?<!there )\b(?:is|are|was|were) no (?!longer|more)\w+",
    ),
    make_rule(
        "as-has",
        PROSE,
        'Say which form: "in the format of …", "matches the index\'s condition".',
        r"\bas (?!(?:it|this|that|long|soon|far|well|much|many) )(?:\w+[\w']* ){1,2}(?:says?|has|have|does|do|shows?|showed|sees?|gave|had)(?: it)?(?=[.;:,)(]|$| \()",
        r"\bas (?:\w+ ){1,2}(?:says?|has|have|shows?|does) it\b",
    ),
    make_rule(
        "bare-ending",
        PROSE,
        "Complete the clause: the sentence ends on an auxiliary verb or an adverb that points back.",
        rf"(?<![`\w])(?<!as )(?<!it )(?<!be )(?<!and ){BARE}[.;](?=\s|$)|, (?:too|once|each)$|\b(?:meanwhile|each|stays|so)$",
    ),
    make_rule(
        "none-colon",
        PROSE,
        'Write "None means …" or "returns None if …".',
        r"(?:^|[;.(] ?|, )(?:None|null|empty|else): |; (?:none|null)(?: if|:)(?= (?:it|they|there|that|all|any|nobody|none)\b)",
    ),
    make_rule(
        "of-chain",
        PROSE - {UI},
        "Use a possessive or a compound noun: the worker's load, the tenant's storage counters.",
        r"\bof (?:the |a |an |its |their |this |one |all )?\w+ of (?:the|a|an|its|their|one|all|\$)",
        r"\b(?:counters|settings|load|values|state|keys?|names?|places?|words) of (?:\$\{|tenants'|the (?:machine|workflow's)|ports\b)",
        r"\bof one\b",
    ),
    make_rule(
        "late-relative",
        PROSE,
        'Keep the relative clause beside its noun: "the port that receives a value for a template".',
        r"\b(?:arrives?|comes?|came|is|are|was|were|runs?|left|made|given|shown|stored|there|known|read|sent) (?:that|which|who|whose) (?:a|an|the|it|its|is|are|was|has|no|nobody)\b",
        r"\b(?:at|in|of|from|under|by) which (?:a|an|the|it|they)\b[^.;]*\bthat\b",
    ),
    make_rule(
        "colon-clause",
        PROSE,
        "Split the sentence: a colon or semicolon followed by a pronoun or a relative clause is slow to read.",
        r"[;:] (?:what|who|then|those|of|else|nothing|others|the others|one that|as)\b(?! \w+ follows)",
        r":[^.;:`]{25,};[^.]{3,}",
    ),
    make_rule(
        "also-when",
        PROSE,
        'Write "even if", "as well", "must be"; not "also when", "is to be", "has still to".',
        r"\balso (?:when|if|of|by|those|without|while|after|where)\b|\b(?:is|are) to be\b|\b(?:has|have) still to\b|, also (?!known)\w+",
    ),
    make_rule(
        "message",
        frozenset({MESSAGE, UI, CLI}),
        'Say what happened and what to do: "… is required", "… must be …", "Use …", "… doesn\'t exist".',
        r"\bis needed\b|\bit takes\b|; takes\b|\bthere (?:is|are):|\b(?:sets|says|means|changes|names) nothing\b|\bmust not .* not \{",
        r"\b(?:is|are|was|were) (?:under way|not understood|not known|not taken)\b|\bcan't be (?:taken|meant|told|had|judged)\b",
        r"\bat once\b|\bthe most\b|^It (?:is|was|goes|comes|can)\b",
    ),
]

NAMES = frozenset(
    {
        "each",
        "found",
        "said",
        "told",
        "kept",
        "asked",
        "given",
        "taken",
        "heard",
        "meant",
        "wanted",
        "left",
        "gone",
        "made",
        "there",
    }
)
NAME_ADVICE = "Name the variable after the thing it holds: job, file, worker, row."

ROOT = Path(__file__).parents[2]
ROOTS = tuple(
    ROOT / name
    for name in (
        "src",
        "web",
        "docs",
        "examples",
        "tools",
        "deploy",
        "README.md",
        "CONTRIBUTING.md",
    )
)
TEXT_SUFFIXES = (".py", ".ts", ".tsx", ".md")
# Declarations and tests of the pages, and generated files.
NOT_PROSE = (".d.ts", ".test.ts", ".test.tsx", "api/schema.ts")
GENERATED_DOCS = frozenset({"api.md", "commands.md", "errors.md", "inspect-json.md", "python.md"})
SKIPPED_FOLDERS = frozenset(
    {".git", ".venv", "venv", "node_modules", "dist", "build", "tests", "versions", "bench"}
)
LOG_METHODS = frozenset(
    {"debug", "info", "warning", "error", "exception", "critical", "warn", "log"}
)
MESSAGE_KEYWORDS = frozenset({"message", "hint", "detail", "reason"})
HELP_KEYWORDS = frozenset({"help", "short_help", "epilog"})
DIRECTIVE = re.compile(
    r"^\s*(?:noqa|type:|pragma|pyright|mypy|fmt:|ruff|eslint|biome|ts-|@|!|TODO|https?:|--|v8 ignore|<)",
    re.IGNORECASE,
)
COMMENTED_CODE = re.compile(r"^[\w.\[\]\"']+\s*(?:=|\(|\[|\{)|[;{}]\s*$")
WORD = re.compile(r"[A-Za-z][A-Za-z'\u2019]*")


class Text(NamedTuple):
    kind: str
    line: int
    text: str


class Finding(NamedTuple):
    file: str
    line: int
    rule: str
    kind: str
    text: str


def check_text(kind: str, text: str) -> list[str]:
    """Returns the distinct names of the rules that the text breaks."""
    plain = re.sub(r"``?[^`]*``?", "`x`", text)
    return list(dict.fromkeys(r.name for r in RULES if kind in r.kinds and r.pattern.search(plain)))


def literal(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{x}" for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        first, second = literal(node.left), literal(node.right)
        return (first or "{x}") + (second or "{x}") if first or second else None
    return None


def call_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def is_command(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(
        call_name(d.func if isinstance(d, ast.Call) else d) in ("command", "default")
        for d in decorators
    )


def docstrings(tree: ast.Module) -> Iterator[Text]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield Text(
                    CLI if is_command(node) else DOCSTRING,
                    node.body[0].lineno,
                    text.split("\n\n")[0],
                )


def messages(tree: ast.Module, raised: frozenset[str]) -> Iterator[Text]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = call_name(node.func)
        if name in raised or (name in LOG_METHODS and isinstance(node.func, ast.Attribute)):
            for argument in [
                *node.args,
                *(k.value for k in node.keywords if k.arg in MESSAGE_KEYWORDS),
            ]:
                text = literal(argument)
                if text and len(WORD.findall(text)) >= 4:
                    yield Text(MESSAGE, argument.lineno, text)
        for keyword in node.keywords:
            text = literal(keyword.value) if keyword.arg in HELP_KEYWORDS else None
            if text:
                yield Text(CLI, keyword.value.lineno, text)


def raised_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield call_name(node.exc.func)


def help_constants(tree: ast.Module) -> Iterator[Text]:
    for node in tree.body:
        text = literal(node.value) if isinstance(node, ast.Assign) else None
        for paragraph in re.split(r"\n\s*\n", text or ""):
            if not paragraph.startswith("```"):
                yield Text(CLI, node.lineno, paragraph)


def python_comments(source: str) -> Iterator[Text]:
    """Yields comments; comments on successive lines are joined."""
    block: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        has_code_before = bool(token.line[: token.start[1]].strip())
        if block and (has_code_before or token.start[0] != block[-1][0] + 1):
            yield from join_comment(block)
        block.append((token.start[0], token.string.lstrip("#: ").rstrip()))
        if has_code_before:
            yield from join_comment(block)
    yield from join_comment(block)


def join_comment(block: list[tuple[int, str]]) -> Iterator[Text]:
    if block and not DIRECTIVE.match(block[0][1]) and not COMMENTED_CODE.search(block[0][1]):
        yield Text(COMMENT, block[0][0], " ".join(part for _, part in block))
    block.clear()


def names(tree: ast.Module) -> Iterator[Text]:
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            targets = [node.target]
        elif isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            targets = [node.target]
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Name) and part.id in NAMES:
                    yield Text(NAME, part.lineno, part.id)


TS_COMMENT = re.compile(r"/\*.*?\*/|(?m:^[ \t]*//[^\n]*(?:\n[ \t]*//[^\n]*)*)", re.DOTALL)
TS_NAME = re.compile(
    r"\b(?:const|let) (found|said|told|kept|asked|given|taken|made|each)\b|[(,] ?(each|told|found|said|given)(?:: [^)=]*)?\)? =>"
)
WORDS_ENTRY = re.compile(
    r"""(?:[\w"']\s*:\s*|=>\s*\(?\s*|\?\s*|:\s*|return\s+)("(?:[^"\\\n]|\\.)*"|`(?:[^`\\]|\\.)*`)"""
)


def typescript_texts(source: str, is_words: bool) -> Iterator[Text]:
    def line_of(offset: int) -> int:
        return source.count("\n", 0, offset) + 1

    for match in TS_COMMENT.finditer(source):
        text = re.sub(r"(?m)^\s*(?:/\*+|\*/|\*|//+)|\*/\s*$", " ", match.group()).strip()
        if not DIRECTIVE.match(text) and not COMMENTED_CODE.search(text):
            yield Text(COMMENT, line_of(match.start()), text)
    for match in TS_NAME.finditer(source):
        yield Text(NAME, line_of(match.start()), match.group(1) or match.group(2))
    if is_words:
        without_comments = re.sub(
            r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group()), source, flags=re.DOTALL
        )
        for match in WORDS_ENTRY.finditer(without_comments):
            yield Text(UI, line_of(match.start(1)), match.group(1)[1:-1])


def markdown_sentences(source: str) -> Iterator[Text]:
    source = re.sub(r"(?ms)^[ \t]*```.*?^[ \t]*```", lambda m: "\n" * m.group().count("\n"), source)
    paragraph: list[str] = []
    start = 0
    for number, line in enumerate([*source.splitlines(), ""], 1):
        text = line.strip()
        is_item = bool(re.match(r"(?:[-*+]|\d+[.)])\s", text))
        is_break = not text or text.startswith(("#", "|", "<", "!", "*["))
        if (is_break or is_item) and paragraph:
            joined = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph))
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`*\"(\[])", joined):
                yield Text(DOCS, start, sentence)
            paragraph = []
        if not is_break:
            start = start if paragraph else number
            paragraph.append(re.sub(r"^(?:[-*+]|\d+[.)])\s+", "", text))


def read_python(
    path: Path, tree: ast.Module, source: str, raised: frozenset[str]
) -> Iterator[Text]:
    yield from docstrings(tree)
    yield from messages(tree, raised)
    yield from python_comments(source)
    yield from names(tree)
    if "help" in path.stem:
        yield from help_constants(tree)


def find_files(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    for path in sorted(root.rglob("*")):
        folders = path.relative_to(root).parts[:-1]
        is_generated = path.parent.name == "reference" and path.name in GENERATED_DOCS
        is_text = path.suffix in TEXT_SUFFIXES and not str(path).endswith(NOT_PROSE)
        if is_text and not is_generated and not SKIPPED_FOLDERS.intersection(folders):
            yield path


def read_texts(
    path: Path, source: str, tree: ast.Module | None, raised: frozenset[str]
) -> list[Text]:
    if tree is not None:
        texts = read_python(path, tree, source, raised)
    elif path.suffix == ".md":
        texts = markdown_sentences(source)
    else:
        texts = typescript_texts(source, is_words={"words", "en"} <= set(path.parts))
    return sorted(texts, key=lambda text: text.line)


def check(root: Path, roots: Sequence[Path]) -> Iterator[Finding]:
    """Yields the findings below some folders, in the order of files and lines.

    File names in findings are relative to `root`.
    """
    paths = [path for folder in roots for path in find_files(folder)]
    sources = {path: path.read_text(encoding="utf-8") for path in paths}
    trees = {path: ast.parse(source) for path, source in sources.items() if path.suffix == ".py"}
    raised = frozenset(name for tree in trees.values() for name in raised_names(tree))
    for path, source in sources.items():
        file = path.relative_to(root).as_posix()
        for text in read_texts(path, source, trees.get(path), raised):
            flat = re.sub(r"\s+", " ", text.text).strip()
            if text.kind == NAME:
                yield Finding(file, text.line, "name", NAME, flat)
            elif len(WORD.findall(flat)) >= 2:
                for name in check_text(text.kind, flat):
                    yield Finding(file, text.line, name, text.kind, flat)


def main() -> None:
    roots = [Path(argument).resolve() for argument in sys.argv[1:]] or list(ROOTS)
    findings = list(check(ROOT, roots))
    for finding in findings:
        sys.stdout.write(f"{finding.file}:{finding.line}: {finding.rule}: {finding.text}\n")
    advice = {rule.name: rule.advice for rule in reversed(RULES)} | {"name": NAME_ADVICE}
    for name, count in collections.Counter(finding.rule for finding in findings).most_common():
        sys.stdout.write(f"{count:6}  {name:14} {advice[name]}\n")


if __name__ == "__main__":
    main()
