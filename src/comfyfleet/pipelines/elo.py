"""Scores from pairwise votes. The votes are the truth; scores are what comes of replaying them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from uuid import UUID

from comfyfleet.pipelines.model import START_SCORE, Candidate, Status

STAKE = 32.0  # the most that one vote moves a score
SPREAD = 400.0  # a lead of so much is expected to win ten times in eleven


class Vote(NamedTuple):
    id: UUID
    winner: UUID
    loser: UUID


def expected(one: float, other: float) -> float:
    """How likely the first is to win."""
    return float(1 / (1 + 10 ** ((other - one) / SPREAD)))


def counted(scores: Mapping[UUID, float], vote: Vote) -> dict[UUID, float]:
    """The scores after one more vote."""
    changed = dict(scores)
    _count(changed, vote)
    return changed


def replayed(votes: Iterable[Vote]) -> dict[UUID, float]:
    """In the order in which they were given."""
    scores: dict[UUID, float] = {}
    for vote in votes:
        _count(scores, vote)
    return scores


def _count(scores: dict[UUID, float], vote: Vote) -> None:
    """What one wins, the other loses."""
    winner, loser = scores.get(vote.winner, START_SCORE), scores.get(vote.loser, START_SCORE)
    moved = STAKE * (1 - expected(winner, loser))
    scores[vote.winner] = winner + moved
    scores[vote.loser] = loser - moved if vote.loser != vote.winner else winner


def undone(votes: Iterable[Vote], vote_id: UUID) -> tuple[Vote, ...]:
    """As if it had never been given: replay what is left."""
    return tuple(vote for vote in votes if vote.id != vote_id)


def next_pair(
    candidates: Sequence[Candidate], votes: Sequence[Vote]
) -> tuple[Candidate, Candidate] | None:
    """The one that was compared least, beside the one that is closest to it and new to it.

    Of one step, and none that was rejected. Two that are close teach more than two that are far apart.
    """
    able = [each for each in candidates if each.status != Status.REJECTED]
    if len(able) < 2:
        return None
    times = Counter(side for vote in votes for side in (vote.winner, vote.loser))
    first = min(able, key=lambda each: (times[each.id], each.created_at, each.id))
    met = Counter(
        vote.loser if vote.winner == first.id else vote.winner
        for vote in votes
        if first.id in (vote.winner, vote.loser)
    )
    others = [each for each in able if each.id != first.id and each.step == first.step]
    second = min(
        others,
        key=lambda each: (met[each.id], abs(each.score - first.score), times[each.id], each.id),
        default=None,
    )
    return None if second is None else (first, second)
