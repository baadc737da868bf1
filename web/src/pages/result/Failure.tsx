/** Shows why a job failed, was cancelled or expired, whether its tokens were refunded, and what the
 * user can do next. */

import type { ReactNode } from "react"
import { useLocation } from "wouter"
import { api, cache, useAct, useQuery } from "@/api"
import type { FollowedJob, JobAnswer } from "@/api/schema"
import { Button, CopyButton, ErrorNote, exactTime, Icon, LinkButton, Status, tokens } from "@/ui"
import { words } from "@/words/en/result"

interface EndedProps {
  job: JobAnswer
  followed: FollowedJob
}

export function Failure({ job, followed }: EndedProps) {
  const [, go] = useLocation()
  const isCancelled = job.status === "cancelled"
  const retry = useAct(async () => {
    const newJob = await api.post<JobAnswer>(`/api/ai-jobs/${job.id}/retry`)
    cache.invalidate("/api/wallet")
    cache.invalidate("/api/account")
    go(`/results/${newJob.id}`)
  })
  const slug = followed.effect_slug
  const reason = sentence(job.error)
  const isShort = reason !== null && reason.length <= 90
  return (
    <Ended
      job={job}
      pill={
        <Status status={job.status} pill>
          {isCancelled ? words.cancelled : words.notMade}
        </Status>
      }
      title={isCancelled ? words.cancelledTitle : isShort ? reason : words.failedTitle}
      lead={isCancelled || isShort ? null : reason}
    >
      <Refund tokensBack={followed.refunded_tokens} />
      {retry.error && <ErrorNote error={retry.error} />}
      <div className="result-ways">
        {slug && (
          <LinkButton
            kind="go"
            size="large"
            icon={job.video_id ? "upload" : "again"}
            href={`/effects/${slug}${isCancelled || !job.video_id ? `?from=${job.id}` : ""}`}
          >
            {isCancelled || !job.video_id ? words.startAgain : words.uploadAnother}
          </LinkButton>
        )}
        {slug && !isCancelled && job.video_id && (
          <LinkButton size="large" icon="sliders" href={`/effects/${slug}?from=${job.id}`}>
            {words.otherSettings}
          </LinkButton>
        )}
        {!isCancelled && (
          <Button kind="ghost" size="large" busy={retry.isRunning} onClick={() => void retry.run()}>
            {words.tryAgain}
          </Button>
        )}
      </div>
      {!isCancelled && <Support job={job} />}
    </Ended>
  )
}

export function Expired({ job, followed }: EndedProps) {
  const slug = followed.effect_slug
  return (
    <Ended job={job} pill={null} title={words.expiredTitle} lead={words.expiredText}>
      <div className="result-ways">
        {slug && (
          <LinkButton kind="go" size="large" icon="again" href={`/effects/${slug}?from=${job.id}`}>
            {words.makeAgain}
          </LinkButton>
        )}
        <LinkButton size="large" href="/media">
          {words.allMedia}
        </LinkButton>
      </div>
    </Ended>
  )
}

interface EndProps {
  job: JobAnswer
  pill: ReactNode
  title: string
  lead: string | null
  children: ReactNode
}

function Ended({ job, pill, title, lead, children }: EndProps) {
  const { original } = job
  return (
    <div className="result-ended">
      <div className="result-was">
        {original?.content_type.startsWith("image/") && <img src={original.url} alt={words.yours} />}
      </div>
      <section className="result-why">
        {pill}
        <h1>{title}</h1>
        {lead && <p className="result-lead">{lead}</p>}
        {children}
      </section>
    </div>
  )
}

function Refund({ tokensBack }: { tokensBack: number }) {
  const wallet = useQuery<{ balance: number }>("/api/wallet")
  if (tokensBack === 0) return null
  return (
    <div className="result-refund">
      <Icon name="undo" />
      <div>
        <strong>{words.back(tokens(tokensBack))}</strong>
        <span>{wallet.data ? words.balance(tokens(wallet.data.balance)) : " "}</span>
      </div>
    </div>
  )
}

function Support({ job }: { job: JobAnswer }) {
  const facts = [
    [words.job, job.id],
    [words.when, exactTime(new Date(job.completed_at ?? job.submitted_at))],
    [words.reason, job.error ?? ""],
  ] as const
  const text = facts.map(([name, value]) => `${name} ${value}`).join("\n")
  return (
    <details className="result-support">
      <summary>{words.support}</summary>
      <dl>
        {facts.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
      <CopyButton text={text} size="small" />
    </details>
  )
}

function sentence(text: string | null): string | null {
  const trimmed = text?.trim()
  if (!trimmed) return null
  const ended = /[.!?…]$/.test(trimmed) ? trimmed : `${trimmed}.`
  return ended.charAt(0).toUpperCase() + ended.slice(1)
}
