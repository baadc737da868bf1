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
  useEvents<FollowedJob>(ACCOUNT_EVENTS, (told, { event }) => {
    if (event !== "job") return
    cache.set<FollowedJobs>(ACTIVE, (before) => put(before, told))
    if (!isActive(told)) {
      cache.invalidate("/api/ai-jobs?")
      cache.invalidate("/api/wallet")
    }
  })
  // Requested at once although it is shown below the jobs in progress, so that it doesn't move
  // anything when it arrives.
  useQuery<Jobs>("/api/ai-jobs", FIRST)
  return (
    <Page title={words.listTitle}>
      <Loaded query={active} skeleton={<Skeleton height="60vh" />}>
        {({ jobs }) => (
          <ul className="results">
            {jobs.map((each) => (
              <li key={each.id}>
                <ActiveRow job={each} />
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
export function put(before: FollowedJobs | undefined, told: FollowedJob): FollowedJobs | undefined {
  if (!before) return before
  const old = before.jobs.find((each) => each.id === told.id)
  const rest = before.jobs.filter((each) => each.id !== told.id)
  if (!isActive(told)) return { jobs: rest }
  if (!old) return { jobs: [told, ...rest] }
  return { jobs: before.jobs.map((each) => (each.id === told.id ? merged(old, told) : each)) }
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
        told={job.progress !== null}
      />
    </Link>
  )
}

function Ended({ before, hasActive }: { before: string | null; hasActive: boolean }) {
  const [isMore, setMore] = useState(false)
  const page = useQuery<Jobs>("/api/ai-jobs", { ...FIRST, query: { ...FIRST.query, before } })
  const effects = useQuery<PublicEffects>("/api/effects", { query: { limit: 100 }, freshSeconds: 60 })
  const titleOf = (job: JobSummary) =>
    effects.data?.effects.find((each) => each.id === job.effect_id)?.title ?? words.anEffect
  return (
    <Loaded query={page} skeleton={<Skeleton height="60vh" />}>
      {({ jobs, next }) => {
        const ended = jobs.filter((each) => !isActive(each) && each.effect_id)
        if (ended.length === 0 && !next && before === null && !hasActive) return <Nothing />
        return (
          <>
            <ul className="results">
              {ended.map((each) => (
                <li key={each.id}>
                  <Link href={`/results/${each.id}`} className="results-row">
                    <Status status={each.status}>{wordOf(each)}</Status>
                    <strong className="cut-text">{titleOf(each)}</strong>
                    <span className="results-told cut-text faint">
                      {each.error ?? tokens(each.price_tokens)}
                    </span>
                    <Time at={each.completed_at ?? each.submitted_at} />
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
