/** Lists all jobs of effects: jobs in progress with live updates, and below them the latest
 * finished ones. */

import { useState } from "react"
import { Link } from "wouter"
import { cache, useEvents, useQuery } from "@/api"
import type { FollowedJob, FollowedJobs, JobSummary, Jobs, PublicEffects } from "@/api/schema"
import { Button, Empty, LinkButton, Loaded, Page, Progress, Skeleton, Status, Time, tokens } from "@/ui"
import { words } from "@/words/en/result"
import { ACCOUNT_EVENTS, isActive, merged } from "../result/follow"
import "./results.css"

const ACTIVE = "/api/account/progress"
const FIRST = { query: { limit: 20 }, freshSeconds: 2 }

export default function Results() {
  const active = useQuery<FollowedJobs>(ACTIVE)
  useEvents<FollowedJob>(ACCOUNT_EVENTS, (job, { event }) => {
    if (event !== "job") return
    cache.set<FollowedJobs>(ACTIVE, (before) => put(before, job))
    if (!isActive(job)) {
      cache.invalidate("/api/ai-jobs?")
      cache.invalidate("/api/wallet")
    }
  })
  // Requested immediately, although the list is shown below the jobs in progress, so that nothing
  // moves when it arrives.
  useQuery<Jobs>("/api/ai-jobs", FIRST)
  return (
    <Page title={words.listTitle}>
      <Loaded query={active} skeleton={<Skeleton height="60vh" />}>
        {({ jobs }) => (
          <ul className="results">
            {jobs.map((job) => (
              <li key={job.id}>
                <ActiveRow job={job} />
              </li>
            ))}
          </ul>
        )}
      </Loaded>
      {!active.isFirstLoad && <Ended before={null} hasActive={(active.data?.jobs.length ?? 0) > 0} />}
    </Page>
  )
}

/** Updates one job in the list, or removes it if it has ended. */
export function put(before: FollowedJobs | undefined, update: FollowedJob): FollowedJobs | undefined {
  if (!before) return before
  const old = before.jobs.find((job) => job.id === update.id)
  const rest = before.jobs.filter((job) => job.id !== update.id)
  if (!isActive(update)) return { jobs: rest }
  if (!old) return { jobs: [update, ...rest] }
  return { jobs: before.jobs.map((job) => (job.id === update.id ? merged(old, update) : job)) }
}

function ActiveRow({ job }: { job: FollowedJob }) {
  const title = job.effect_title || words.anEffect
  return (
    <Link href={`/results/${job.id}`} className="results-row">
      <Status status={job.status}>{job.status === "queued" ? words.queued : words.running}</Status>
      <strong className="cut-text">{title}</strong>
      <span className="results-told cut-text faint">{job.why ?? job.node_title}</span>
      <Progress
        label={title}
        value={job.progress === null ? 0 : job.progress / 100}
        withPercent={job.progress !== null}
      />
    </Link>
  )
}

function Ended({ before, hasActive }: { before: string | null; hasActive: boolean }) {
  const [isMore, setMore] = useState(false)
  const page = useQuery<Jobs>("/api/ai-jobs", { ...FIRST, query: { ...FIRST.query, before } })
  const effects = useQuery<PublicEffects>("/api/effects", { query: { limit: 100 }, freshSeconds: 60 })
  const titleOf = (job: JobSummary) =>
    effects.data?.effects.find((effect) => effect.id === job.effect_id)?.title ?? words.anEffect
  return (
    <Loaded query={page} skeleton={<Skeleton height="60vh" />}>
      {({ jobs, next }) => {
        const ended = jobs.filter((job) => !isActive(job) && job.effect_id)
        if (ended.length === 0 && !next && before === null && !hasActive) return <Nothing />
        return (
          <>
            <ul className="results">
              {ended.map((job) => (
                <li key={job.id}>
                  <Link href={`/results/${job.id}`} className="results-row">
                    <Status status={job.status}>{wordOf(job)}</Status>
                    <strong className="cut-text">{titleOf(job)}</strong>
                    <span className="results-told cut-text faint">
                      {job.error ?? tokens(job.price_tokens)}
                    </span>
                    <Time at={job.completed_at ?? job.submitted_at} />
                  </Link>
                </li>
              ))}
            </ul>
            {next && !isMore && <Button onClick={() => setMore(true)}>{words.older}</Button>}
            {next && isMore && <Ended before={next} hasActive={hasActive} />}
          </>
        )
      }}
    </Loaded>
  )
}

function wordOf(job: JobSummary): string {
  if (job.status === "completed") return words.ready
  return job.status === "failed" ? words.notMade : words.cancelled
}

function Nothing() {
  return (
    <Empty
      title={words.listNone}
      act={
        <LinkButton kind="go" href="/">
          {words.toEffects}
        </LinkButton>
      }
    >
      {words.listNoneText}
    </Empty>
  )
}
