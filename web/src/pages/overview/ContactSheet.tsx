/** Shows the workers as a contact sheet. The line in each picture marks the job's measured
 * progress. */

import { memo, useEffect, useRef, useState } from "react"
import { Link } from "wouter"
import { api } from "@/api"
import type { JobPreview, WorkerSeen } from "@/api/schema"
import { notifyFailed } from "@/pages/jobs/BulkBar"
import { approve } from "@/pages/workers/acts"
import { type Condition, conditionOf, gpuName, runningJob, sortedWorkers } from "@/pages/workers/machines"
import { Button, LinkButton, Progress, StateIcon, shortId } from "@/ui"
import { words } from "@/words/en/overview"
import { words as machines } from "@/words/en/workers"

const SHOWN_MAX = 28

const PAUSE_MS = 400

/** Returns the latest preview of each worker's job, by job, while `isOn` is true. Previews are read
 * one after another, so that many workers don't cause many concurrent calls. */
function usePreviews(workers: readonly WorkerSeen[], isOn: boolean): ReadonlyMap<string, string> {
  const [pictures, setPictures] = useState<ReadonlyMap<string, string>>(new Map())
  const jobs = useRef<readonly string[]>([])
  jobs.current = workers.flatMap((worker) => runningJob(worker)?.job_id ?? [])
  useEffect(() => {
    if (!isOn) return undefined
    const stop = new AbortController()
    const look = async (id: string) => {
      const path = `/api/admin/jobs/${id}/preview`
      const { preview } = await api.get<JobPreview>(path, { signal: stop.signal })
      if (preview)
        setPictures((before) => new Map([...before, [id, preview] as const].filter(([key]) => isThere(key))))
    }
    const isThere = (id: string) => jobs.current.includes(id)
    const goOn = async () => {
      while (!stop.signal.aborted) {
        // Skips jobs that have finished in the meantime or can't be reached. The next round tries
        // again.
        for (const id of jobs.current)
          if (isThere(id) && document.visibilityState === "visible") await look(id).catch(() => undefined)
        await new Promise((resolve) => setTimeout(resolve, PAUSE_MS))
      }
    }
    void goOn()
    return () => {
      stop.abort()
      setPictures(new Map())
    }
  }, [isOn])
  return pictures
}

interface SheetProps {
  workers: readonly WorkerSeen[]
  /** True if the sheet shows previews of the jobs. Viewing a customer's job is audited. */
  withPreviews: boolean
}

export function ContactSheet({ workers, withPreviews }: SheetProps) {
  const shown = sortedWorkers(workers.filter((worker) => worker.state !== "revoked")).slice(0, SHOWN_MAX)
  const pictures = usePreviews(shown, withPreviews)
  if (shown.length === 0)
    return (
      <div className="overview-none">
        <span>{words.noWorkers}</span>
        <LinkButton kind="go" size="small" href="/console/workers">
          {words.addWorker}
        </LinkButton>
      </div>
    )
  return (
    <ul className="overview-sheet" aria-label={words.workers}>
      {shown.map((worker) => (
        <Tile
          key={worker.worker_id}
          worker={worker}
          picture={pictures.get(runningJob(worker)?.job_id ?? "")}
        />
      ))}
    </ul>
  )
}

interface TileProps {
  worker: WorkerSeen
  picture: string | undefined
}

const Tile = memo(function Tile({ worker, picture }: TileProps) {
  const condition = conditionOf(worker)
  const name = worker.worker_id
  const job = runningJob(worker)
  return (
    <li className={`overview-tile is-${condition}`} aria-label={`${name}: ${machines.conditions[condition]}`}>
      {condition === "pending" ? (
        <div className="overview-print">
          <Button kind="go" size="small" onClick={() => void approve(name).catch(notifyFailed)}>
            {words.acts.approve}
          </Button>
        </div>
      ) : job && condition !== "silent" ? (
        <Link className="overview-print" href={`/console/jobs/${job.job_id}`}>
          {picture && <img src={picture} alt={words.previewOf(name)} />}
          <i className="overview-done" style={{ width: `${job.percent ?? 0}%` }} />
          <span className="overview-what">
            <b>{job.workflow}</b>
            <span>{job.node ? words.tile.node(job.node) : shortId(job.job_id)}</span>
          </span>
          <span className="unseen">
            <Progress
              label={machines.progressOf(shortId(job.job_id))}
              value={job.percent === null ? null : job.percent / 100}
            />
          </span>
        </Link>
      ) : (
        <Link className="overview-print" href={`/console/workers/${encodeURIComponent(name)}`}>
          <span className="overview-still">
            {(condition === "offline" || condition === "faulty") && <StateIcon state="failed" />}
            {TILE_TEXT[condition]}
          </span>
        </Link>
      )}
      <p className="overview-caption">
        <Link href={`/console/workers/${encodeURIComponent(name)}`}>{name}</Link>
        <span>{captionOf(worker, condition)}</span>
      </p>
    </li>
  )
})

const TILE_TEXT: Readonly<Record<Condition, string>> = {
  pending: "",
  faulty: machines.conditions.faulty,
  busy: words.tile.preparing,
  draining: words.tile.drained,
  idle: words.tile.idle,
  silent: words.tile.silent,
  offline: words.tile.gone,
  revoked: words.tile.revoked,
}

function captionOf(worker: WorkerSeen, condition: Condition): string {
  if (condition === "pending") return words.tile.new
  if (condition === "draining") return words.drains
  const job = runningJob(worker)
  if (job?.percent != null) return `${Math.floor(job.percent)}%`
  return condition === "idle" ? gpuName(worker.gpu ?? "") : ""
}
