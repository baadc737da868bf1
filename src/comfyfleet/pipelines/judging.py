"""People judge: approve, reject, crown, compare two, and take back any of it."""

from typing import NamedTuple
from uuid import UUID

from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import Conflict, InvalidInput, NotFound
from comfyfleet.pipelines import elo
from comfyfleet.pipelines.acting import Act, acting, own_run
from comfyfleet.pipelines.decide import to_cancel
from comfyfleet.pipelines.elo import Vote, next_pair
from comfyfleet.pipelines.model import START_SCORE, Candidate, Status
from comfyfleet.pipelines.state import read_state
from comfyfleet.pipelines.store import acts, candidates, jobs

_ACTS = {Status.APPROVED: "approved", Status.REJECTED: "rejected", Status.WINNER: "crowned"}


class Whose(NamedTuple):
    """Who acts, and on which candidate."""

    tenant_id: UUID
    user_id: UUID
    run_id: UUID
    candidate_id: UUID


async def judge(sides: Sides, whose: Whose, verdict: Status) -> Candidate:
    """The same again changes nothing. Rejecting stops the branch: its queued jobs are cancelled."""
    if verdict not in _ACTS:
        raise InvalidInput(f"a candidate can't be made {verdict}; undo what was said of it")
    async with acting(sides, whose.tenant_id, whose.user_id, whose.run_id) as act:
        found = await _get(act, whose.candidate_id)
        if found.status != verdict:
            await _set(act, found, verdict)
            await acts.add_judgement(act.tx, _judgement(act, found, verdict))
            stopped = await _stop_branches(act) if verdict == Status.REJECTED else 0
            await act.record(
                _ACTS[verdict],
                candidate_id=str(found.id),
                before=found.status,
                jobs_cancelled=stopped,
            )
        return await _get(act, whose.candidate_id)


async def _get(act: Act, candidate_id: UUID) -> Candidate:
    found = await candidates.get(act.tx, act.stored.id, candidate_id)
    if found is None:
        raise NotFound(f"there is no candidate {candidate_id}")
    return found


async def _set(act: Act, found: Candidate, status: Status) -> None:
    if not await candidates.set_status(act.tx, found.id, before=found.status, after=status):
        raise Conflict("somebody else has just judged it; look again")


def _judgement(act: Act, found: Candidate, verdict: Status) -> dict[str, object]:
    return {
        "tenant_id": act.stored.tenant_id,
        "run_id": act.stored.id,
        "candidate_id": found.id,
        "before": found.status,
        "after": verdict,
        "created_at": act.now,
    }


async def _stop_branches(act: Act) -> int:
    """Asked anew under a lock: a job that has started meanwhile is let end."""
    state = await read_state(act.tx, act.stored.tenant_id, act.stored.id)
    queued = set(await jobs.queued_of(act.tx, act.stored.id))
    stopped = [each for each in to_cancel(state.tree, state.in_flight) if each.job_id in queued]
    for each in stopped:
        await act.cancel_job(each.job_id)
    return len(stopped)


async def undo(sides: Sides, whose: Whose) -> Candidate:
    """The last judgement of this candidate, as if it had never been given."""
    async with acting(sides, whose.tenant_id, whose.user_id, whose.run_id) as act:
        found = await _get(act, whose.candidate_id)
        last = await acts.last_judgement(act.tx, found.id)
        if last is None:
            raise Conflict("nothing was said of this candidate that could be undone")
        await _set(act, found, last.before)
        await acts.undo_judgement(act.tx, last.id, now=act.now)
        stopped = await _stop_branches(act) if last.before == Status.REJECTED else 0
        await act.record(
            "undone",
            candidate_id=str(found.id),
            before=found.status,
            after=last.before,
            jobs_cancelled=stopped,
        )
        return await _get(act, whose.candidate_id)


async def pair(
    sides: Sides, tenant_id: UUID, user_id: UUID, run_id: UUID, *, step: int | None = None
) -> tuple[Candidate, Candidate] | None:
    """Two of one step that are worth comparing; the deepest step that has two, unless one is named."""
    pool = await sides.pool_of(tenant_id)
    async with pool.look() as tx:
        await own_run(tx, tenant_id, user_id, run_id)
        tree = await candidates.tree_of(tx, run_id)
        votes = await acts.votes_of(tx, run_id)
        steps = sorted({each.step for each in tree.values()}, reverse=True)
        for number in steps if step is None else [step]:
            chosen = next_pair([each for each in tree.values() if each.step == number], votes)
            if chosen:
                whole = [await candidates.get(tx, run_id, each.id) for each in chosen]
                first, second = whole
                return (first, second) if first and second else None
    return None


async def vote(
    sides: Sides,
    tenant_id: UUID,
    user_id: UUID,
    run_id: UUID,
    *,
    vote_id: UUID,
    winner: UUID,
    loser: UUID,
) -> dict[UUID, float]:
    """The scores of the two. The same vote again changes nothing."""
    if winner == loser:
        raise InvalidInput("a candidate can't be compared with itself", field="loser")
    async with acting(sides, tenant_id, user_id, run_id) as act:
        one, other = await _get(act, winner), await _get(act, loser)
        if one.step != other.step:
            raise InvalidInput("only candidates of one step are compared", field="loser")
        given = Vote(vote_id, winner, loser)
        if await acts.add_vote(act.tx, _vote_row(act, given)):
            scores = elo.counted({winner: one.score, loser: other.score}, given)
            await candidates.set_scores(act.tx, scores)
            await act.record("voted", vote_id=str(vote_id), winner=str(winner), loser=str(loser))
            return scores
        before = await acts.vote(act.tx, run_id, vote_id)
        if before is None or before[0] != given:
            raise Conflict("this vote's id was used for another vote", field="id")
        return {winner: one.score, loser: other.score}


def _vote_row(act: Act, given: Vote) -> dict[str, object]:
    return {
        "id": given.id,
        "tenant_id": act.stored.tenant_id,
        "run_id": act.stored.id,
        "winner_id": given.winner,
        "loser_id": given.loser,
        "created_at": act.now,
    }


async def undo_vote(
    sides: Sides, tenant_id: UUID, user_id: UUID, run_id: UUID, vote_id: UUID
) -> dict[UUID, float]:
    """The other votes are counted anew. Undone twice is undone once."""
    async with acting(sides, tenant_id, user_id, run_id) as act:
        found = await acts.vote(act.tx, run_id, vote_id)
        if found is None:
            raise NotFound(f"there is no vote {vote_id}")
        given, counts = found
        if counts:
            await acts.undo_vote(act.tx, vote_id, now=act.now)
            scores = elo.replayed(await acts.votes_of(act.tx, run_id))
            await candidates.reset_scores(act.tx, run_id, START_SCORE)
            await candidates.set_scores(act.tx, scores)
            await act.record("vote_undone", vote_id=str(vote_id))
        one, other = await _get(act, given.winner), await _get(act, given.loser)
        return {one.id: one.score, other.id: other.score}
