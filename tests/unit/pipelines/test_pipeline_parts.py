"""Templates, names, votes and documents of pipelines."""

from datetime import timedelta, timezone
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.graphs.builders import CATALOGUE
from tests.unit.pipelines.builders import NOW, candidate

from comfyfleet.api.documents import read_document
from comfyfleet.errors import InvalidInput
from comfyfleet.server.catalog.model import Property
from comfyfleet.server.graphs.catalogue import WorkflowFacts, catalogue_of
from comfyfleet.server.pipelines.decide import (
    PairVote,
    apply_vote,
    next_pair,
    replay_votes,
    tally_votes,
    votes_enough,
)
from comfyfleet.server.pipelines.model import (
    START_SCORE,
    CandidateStatus,
    PipelineDefinition,
    Step,
    WorkKey,
    candidate_path,
    clean_folder,
    step_folder,
)
from comfyfleet.server.pipelines.parse import (
    parse_pipeline,
    render,
    repeated_results,
    validate,
    variable_problems,
    with_parent_files,
)

EXAMPLES = Path(__file__).parents[3] / "examples"
FILE = {"file_id": "f1"}
PARENT = candidate(5, file=FILE, seed=42, properties={"text": "a cat"})
VARIABLES = {"subject": 'a "dog" {{ seed }}', "size": 512, "is_new": True, "tags": ["x"]}


def rendered(value: Any, **fields: Any) -> Any:
    step = Step("Fix it", "fix", properties={"value": value}, **fields)
    return render(step, variables=VARIABLES, parent=PARENT, seed=7)["value"]


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("plain", "plain"),
        (3, 3),
        ("{{ variables.size }}", 512),
        ("{{variables.tags}}", ["x"]),
        ("{{ parent.file }}", FILE),
        ("{{ parent.properties.text }}, sharp", "a cat, sharp"),
        ("{{ seed }}", 7),
        ("{{ parent.seed }}-{{ seed }}", "42-7"),
        ("new: {{ variables.is_new }}", "new: true"),
        ("{a|b} {{ variables.size }}", "{a|b} 512"),
        (["{{ seed }}", {"k": "{{ variables.size }}"}], [7, {"k": 512}]),
    ],
)
def test_values_are_put_in_as_they_are(template: Any, value: Any) -> None:
    assert rendered(template) == value


def test_what_was_put_in_is_not_read_again() -> None:
    assert rendered("of {{ variables.subject }}") == 'of a "dog" {{ seed }}'


def test_a_fixed_seed_stays() -> None:
    assert rendered("{{ seed }}", seed=99) == 99


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ variables.nobody }}", "variables.nobody is missing"),
        ("{{ who }}", "'who' is unknown"),
        ("x {{ variables.tags }}", "converted to text"),
    ],
)
def test_an_error_names_the_step_and_the_property(template: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        rendered(template)
    assert (caught.value.details["step"], caught.value.details["property"]) == ("Fix it", "value")


def test_the_first_step_has_no_parent() -> None:
    step = Step("Base", "draw", properties={"x": "{{ parent.file }}"})
    with pytest.raises(InvalidInput, match=r"parent\.file is missing"):
        render(step, variables={}, parent=None, seed=1)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=30))
def test_no_variable_breaks_out_of_its_place(text: str) -> None:
    step = Step("s", "w", properties={"a": "<{{ variables.t }}>", "b": "{{ variables.t }}"})
    found = render(step, variables={"t": text}, parent=None, seed=1)
    assert found == {"a": f"<{text}>", "b": text}


def test_a_candidate_has_its_path() -> None:
    local = NOW.astimezone(timezone(timedelta(hours=9)))
    path = candidate_path(
        target_folder="cats/spring/", step="Fix  the Hands!", candidate_id=UUID(int=10), created_at=local, extension=".PNG"
    )  # fmt: skip
    assert (
        path == "cats/spring/fix-the-hands/00000000-0000-0000-0000-00000000000a_20260301123005.png"
    )


@pytest.mark.parametrize(
    "folder", ["", "/", "/etc", "../x", "a/../../b", "a\\b", "C:x", "a\nb", "x" * 300]
)
def test_a_folder_cannot_lead_outside(folder: str) -> None:
    with pytest.raises(InvalidInput, match="target_folder"):
        clean_folder(folder)


@pytest.mark.parametrize(
    ("name", "folder"), [("Base", "base"), ("up_scale 2×", "up-scale-2"), ("仕上げ", "仕上げ")]
)
def test_a_step_has_its_folder(name: str, folder: str) -> None:
    assert step_folder(name) == folder


@pytest.mark.parametrize(
    ("folder", "clean"),
    [
        ("con/AUX.old/nul", "con_/AUX_.old/nul_"),
        ("lpt1/com¹/console/com", "lpt1_/com¹_/console/com"),
        ("a./b /... /.. /c", "a/b/c"),
        ("\u202egnp.exe", "gnp.exe"),
        ("仕" * 100, "仕" * 80),
    ],
)
def test_a_folder_can_be_made_on_windows_too(folder: str, clean: str) -> None:
    assert clean_folder(folder) == clean
    assert clean_folder(clean) == clean
    with pytest.raises(InvalidInput, match="longer"):
        clean_folder("/".join(["con"] * 50))
    assert [step_folder(name) for name in ("Con", "aux!", "COM7", "Lpt")] == [
        "con_",
        "aux_",
        "com7_",
        "lpt",
    ]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40), st.text(min_size=1, max_size=20), st.text(max_size=6))
def test_every_path_stays_below_its_folder(folder: str, step: str, extension: str) -> None:
    try:
        path = candidate_path(
            target_folder=folder, step=step, candidate_id=UUID(int=1), created_at=NOW, extension=extension
        )  # fmt: skip
    except InvalidInput:
        return
    parts = path.split("/")
    assert ".." not in parts
    assert all(parts)
    assert len(parts) >= 3


VOTES = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 5)).filter(lambda pair: pair[0] != pair[1]),
    max_size=20,
).map(
    lambda pairs: [
        PairVote(UUID(int=100 + n), UUID(int=w), UUID(int=lo)) for n, (w, lo) in enumerate(pairs)
    ]
)


@settings(max_examples=60, deadline=None)
@given(VOTES)
def test_what_one_wins_another_loses(votes: list[PairVote]) -> None:
    scores = replay_votes(votes)
    assert sum(scores.values()) == pytest.approx(START_SCORE * len(scores))


def test_a_win_over_a_stronger_one_moves_more() -> None:
    one, other = UUID(int=1), UUID(int=2)
    vote = PairVote(UUID(int=9), one, other)
    assert apply_vote({}, vote) == {one: 1016.0, other: 984.0}
    assert apply_vote({one: 800.0, other: 1200.0}, vote)[one] - 800 > 16
    assert apply_vote({one: 1200.0, other: 800.0}, vote)[one] - 1200 < 16


def test_a_tie_moves_only_those_that_were_apart() -> None:
    one, other = UUID(int=1), UUID(int=2)
    tie = PairVote(UUID(int=9), one, other, is_tie=True)
    assert apply_vote({}, tie) == {one: START_SCORE, other: START_SCORE}
    apart = apply_vote({one: 1200.0, other: 800.0}, tie)
    assert 800 < apart[other] < apart[one] < 1200
    assert tally_votes(one, [tie, PairVote(UUID(int=10), one, other)]) == (1, 0, 1)
    assert tally_votes(other, [tie, PairVote(UUID(int=10), one, other)]) == (0, 1, 1)


@pytest.mark.parametrize(("many", "enough"), [(0, 0), (1, 0), (2, 1), (3, 3), (4, 6), (12, 30)])
def test_votes_are_enough_when_each_met_five_others(many: int, enough: int) -> None:
    assert votes_enough([candidate(n) for n in range(1, many + 1)]) == enough


def test_a_pair_is_of_those_that_were_compared_least_and_are_close() -> None:
    shown = [
        candidate(1, score=1000),
        candidate(2, score=1300),
        candidate(3, score=1010),
        candidate(4, score=1000, status=CandidateStatus.REJECTED),
    ]
    pair = next_pair(shown, [])
    assert pair is not None
    assert [each.id.int for each in pair] == [1, 3]
    votes = [PairVote(UUID(int=9), UUID(int=1), UUID(int=3))]
    pair = next_pair(shown, votes)
    assert pair is not None
    assert [each.id.int for each in pair] == [2, 3]
    assert next_pair(shown[:1], []) is None
    assert next_pair([candidate(1), candidate(2, 1)], []) is None


def test_every_pair_comes_up() -> None:
    shown = [candidate(n) for n in range(1, 6)]
    votes: list[PairVote] = []
    seen: set[frozenset[UUID]] = set()
    for number in range(20):
        pair = next_pair(shown, votes)
        assert pair is not None
        seen.add(frozenset(each.id for each in pair))
        votes.append(PairVote(UUID(int=100 + number), pair[0].id, pair[1].id))
    assert len(seen) == 10


@pytest.mark.parametrize("name", ["soft-colours", "well-exposed"])
def test_an_example_is_sound_and_asks_for_properties_that_are_there(name: str) -> None:
    text = (EXAMPLES / f"pipelines/{name}.yaml").read_text("utf-8")
    parsed = parse_pipeline(read_document(text))
    assert parsed.problems == ()
    registered = read_document((EXAMPLES / "properties.yaml").read_text("utf-8"))
    for work in parsed.pipeline.works.values():
        known = {each["name"] for each in registered[work.workflow]["properties"]}
        assert set(work.properties) <= known


def test_workflows_and_properties_of_a_pipeline_are_checked() -> None:
    pipeline = PipelineDefinition(
        "p",
        (
            Step("a", "nobody"),
            Step("b", "fix", version=9),
            Step("c", "draw", properties={"text": 3, "size": 1}),
            Step("d", "fix", properties={"mode": "{{ variables.mode }} {{ variables.more.deep }}"}),
        ),
    )
    found = [(each.code, each.node, each.port) for each in validate(pipeline, CATALOGUE)]
    assert found == [
        ("unknown_workflow", "a", "workflow"),
        ("unknown_workflow", "b", "workflow"),
        ("type_mismatch", "c", "text"),
        ("unknown_property", "c", "size"),
        ("missing_input", "d", "input"),
    ]
    assert [str(each) for each in variable_problems(pipeline, {"mode": 1})] == [
        "d.mode: the run has no variable 'more.deep'"
    ]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ([], [("invalid_document", "", "")]),
        ({"name": "x"}, [("invalid_field", "", "")]),
        ({"name": "x", "steps": [{"name": "a", "workflow": "w"}, {"name": "A!", "workflow": "w"}]}, [("repeated_name", "A!", "name")]),
        ({"name": "x", "steps": [{"name": "!", "workflow": "w"}]}, [("invalid_field", "!", "name")]),
        ({"name": "x", "steps": [{"name": "a", "workflow": "w", "kids": 3}]}, [("unknown_field", "a", "kids")]),
        ({"name": "x", "steps": [{"workflow": "w"}]}, [("missing_field", "step 1", "name")]),
        ({"name": "x", "steps": [{"name": "a", "workflow": "w", "properties": {"p": "{{ parent.file }}"}}]}, [("invalid_template", "a", "p")]),
        ({"name": "x", "steps": [{"name": "a", "workflow": "w", "properties": {"p": ["{{ self }}", "{{ open"]}}]},
         [("invalid_template", "a", "p")]),
        ({"name": "x", "steps": [{"name": "a", "workflow": "w"}, {"name": "b", "workflow": "w", "children_per_parent": 3, "images_per_job": 2}]},
         [("invalid_field", "b", "children_per_parent")]),
    ],
)  # fmt: skip
def test_each_mistake_in_a_pipeline_is_told_where_it_is(
    document: Any, expected: list[tuple[str, str, str]]
) -> None:
    found = parse_pipeline(document).problems
    assert [(each.code, each.node, each.port) for each in found] == expected


SEEDED = WorkflowFacts("seeded", 1, (Property("text", "text"), Property("seed", "seed")))
PLAIN = WorkflowFacts("plain", 1, (Property("text", "text"), Property("number", "integer")))


@pytest.mark.parametrize(
    ("facts", "step", "is_repeated"),
    [
        (SEEDED, {}, False),
        (SEEDED, {"seed": 5}, True),
        (SEEDED, {"properties": {"seed": 7}}, True),
        (SEEDED, {"properties": {"seed": "{{ seed }}"}}, False),
        (PLAIN, {"properties": {"text": "{{ variables.subject }}"}}, True),
        (PLAIN, {"properties": {"text": "a cat, number {{ seed }}"}}, False),
        (PLAIN, {"properties": {"number": "{{ seed }}"}}, False),
    ],
)
def test_a_step_whose_candidates_would_be_equal_is_named(
    facts: WorkflowFacts, step: dict[str, Any], is_repeated: bool
) -> None:
    base = Step("Base", facts.slug, **step)
    several = Step("Children", facts.slug, children_per_parent=2, **step)
    single = Step("Child", facts.slug, **step)
    pipeline = PipelineDefinition("p", (base, several, single))
    warnings = repeated_results(pipeline, {WorkKey(number): facts for number in range(3)})
    assert [warning.split("'")[1] for warning in warnings] == ["Base", "Children"] * is_repeated


def test_an_absolute_folder_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidInput) as refused:
        clean_folder("/storage/runs/gym-shoot")
    assert "--follow DIR --folder NAME" in refused.value.details["hint"]


def test_a_later_step_with_several_media_inputs_names_the_parents_file() -> None:
    pictures = tuple(
        Property(name, "image", binding=f"1.{name}", required=True) for name in ("image", "mask")
    )
    catalogue = catalogue_of((WorkflowFacts("draw", 1), WorkflowFacts("blend", 1, pictures)))
    document = {
        "name": "Two",
        "steps": [{"name": "Base", "workflow": "draw"}, {"name": "Mix", "workflow": "blend"}],
    }
    pipeline = parse_pipeline(document).pipeline
    assert with_parent_files(document, pipeline, catalogue) is document
    messages = {problem.message for problem in validate(pipeline, catalogue)}
    assert messages == {"needs a value, such as '{{ parent.file }}'"}
