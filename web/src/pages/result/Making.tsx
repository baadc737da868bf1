/** Shows a job in progress. The picture itself is the progress bar. */

import { useState } from "react"
import { Link } from "wouter"
import { ApiError, api, cache, useQuery } from "@/api"
import type { FollowedJob, FollowedJobs, JobStage, Video } from "@/api/schema"
import { Button, Confirm, duration, tokens } from "@/ui"
import { words } from "@/words/en/result"
import { type Fill, fillOf, useSince } from "./follow"
import { shownRatio } from "./View"

export function Making({ job, preview }: { job: FollowedJob; preview: string | null }) {
  const fill = fillOf(job, useSince(job, job.progress === null))
  const title = job.effect_title || words.anEffect
  const isWaiting = job.stage === "waiting"
  return (
    <div className="result">
      <Picture job={job} preview={preview} fill={fill} />
      <div className="result-under result-making">
        <div className="result-who">
          <h1>{isWaiting ? words.waitsTitle(title) : words.making(title)}</h1>
          <p className="quiet" role="status">
            {statusText(job)}
          </p>
        </div>
        <Stages job={job} fill={fill} />
        <div className="result-acts">
          <Cancel job={job} />
          <Others id={job.id} />
        </div>
      </div>
    </div>
  )
}

function statusText(job: FollowedJob): string {
  const parts = [
    job.why,
    job.node_title,
    job.step !== null && job.steps ? words.step(job.step, job.steps) : null,
    job.stage === "making" && job.seconds_left ? words.left(duration(Math.ceil(job.seconds_left))) : null,
    words.mayClose,
  ]
  return parts
    .filter(Boolean)
    .map((part) => (/[.!?]$/.test(String(part)) ? part : `${part}.`))
    .join(" ")
}

/** The new picture appears to the left of the line, and the original to the right. */
function Picture({ job, preview, fill }: { job: FollowedJob; preview: string | null; fill: Fill }) {
  const video = useQuery<Video>(job.video_id ? `/api/videos/${job.video_id}` : null, { freshSeconds: 300 })
  const original = video.data?.kind === "image" ? video.data.original_file_url : null
  const [ratio, setRatio] = useState(1.5)
  const at = Math.round(fill.part * 1000) / 10
  const look = { "--ratio": ratio, "--x": `${at}%` } as Record<string, string | number>
  const measure = ({ currentTarget: { naturalWidth, naturalHeight } }: { currentTarget: HTMLImageElement }) =>
    naturalHeight > 0 && setRatio(shownRatio(naturalWidth, naturalHeight))
  return (
    <div className="result-stage">
      <div className="result-print result-live" style={look}>
        {original && <img src={original} alt={words.yours} onLoad={measure} />}
        {preview && (
          <img
            src={preview}
            alt={words.livePreview}
            className="result-preview"
            onLoad={original ? undefined : measure}
          />
        )}
        {job.stage !== "waiting" && <i aria-hidden="true" />}
        {preview && (
          <span className="print-tag" aria-hidden="true">
            {words.livePreview}
          </span>
        )}
        {original && (
          <span className="print-tag result-tag-right" aria-hidden="true">
            {words.yours}
          </span>
        )}
        {fill.isReal && <b className="result-percent mono">{Math.floor(fill.part * 100)}%</b>}
      </div>
    </div>
  )
}

/** Four segments, one per stage. Their widths are proportional to the stages' usual durations. */
function Stages({ job, fill }: { job: FollowedJob; fill: Fill }) {
  return (
    <ol className="result-stages" aria-label={words.progress}>
      {job.stages.map((stage) => (
        <li
          key={stage.name}
          className={`is-${stage.state}`}
          aria-current={stage.state === "current" ? "step" : undefined}
        >
          <span className="bar" aria-hidden="true">
            <i style={{ width: `${100 * partOf(stage, fill)}%` }} />
          </span>
          <span className="result-stage-name">
            {stage.name === "waiting" && stage.state === "current"
              ? words.waitingNow
              : words.stages[stage.name]}
          </span>
          <span className="mono result-stage-told">{stageText(stage, fill)}</span>
        </li>
      ))}
    </ol>
  )
}

function partOf(stage: JobStage, fill: Fill): number {
  if (stage.state === "done") return 1
  if (stage.state === "to_come") return 0
  if (stage.name === "making") return fill.part
  return stage.name === "finishing" ? 0.5 : 0.15
}

function stageText(stage: JobStage, fill: Fill): string {
  if (stage.state === "done" && stage.seconds) return duration(stage.seconds)
  if (stage.state === "current" && stage.name === "making" && fill.isReal)
    return `${Math.floor(fill.part * 100)}%`
  return ""
}

function Cancel({ job }: { job: FollowedJob }) {
  const [isOpen, setOpen] = useState(false)
  const back = tokens(job.price_tokens)
  return (
    <>
      <Button onClick={() => setOpen(true)}>
        {job.price_tokens > 0 ? words.cancelFor(back) : words.cancel}
      </Button>
      <Confirm
        open={isOpen}
        onClose={() => setOpen(false)}
        title={words.cancelTitle}
        act={words.cancelAct}
        onConfirm={async () => {
          // If the job has finished in the meantime, its result is shown instead.
          await api.delete(`/api/ai-jobs/${job.id}`).catch((error: unknown) => {
            if (!(error instanceof ApiError && error.code === "job_ended")) throw error
          })
          cache.invalidate(`/api/ai-jobs/${job.id}`)
          cache.invalidate("/api/wallet")
          cache.invalidate("/api/account")
        }}
      >
        {words.cancelText(back)}
      </Confirm>
    </>
  )
}

/** Lists the user's other jobs in progress. */
function Others({ id }: { id: string }) {
  const all = useQuery<FollowedJobs>("/api/account/progress", { freshSeconds: 10 })
  const others = all.data?.jobs.filter((job) => job.id !== id).length ?? 0
  if (others === 0) return null
  return (
    <Link href="/results" className="link result-others">
      {words.others(others)}
    </Link>
  )
}
