/** Workers as rows: state, machine, jobs and load. */

import { memo, type ReactNode, useEffect, useRef, useState } from "react"
import { Link } from "wouter"
import { useQuery } from "@/api"
import type { Readings, WorkerSeen } from "@/api/schema"
import { Badge, Progress, percent, Status, shortId, Time } from "@/ui"
import { Plot } from "@/ui/Plot"
import { words } from "@/words/en/workers"
import { type Ask, WorkerButtons } from "./acts"
import { type Condition, conditionOf, gigabytes, gpuName, modelName, runningJob, STATE_OF } from "./machines"
import { WORKERS } from "./useMachines"

interface RowsProps {
  label: string
  workers: readonly WorkerSeen[]
  ask: Ask
  /** True if the rows belong to more than one fleet. */
  withFleet?: boolean
}

export function WorkerRows({ label, workers, ask, withFleet = false }: RowsProps) {
  const { columns } = words
  return (
    <div className={withFleet ? "workers-list workers-list-all" : "workers-list"}>
      <div className="workers-row workers-heads" aria-hidden="true">
        <span>{columns.state}</span>
        <span>{columns.worker}</span>
        <span>{columns.memory}</span>
        <span className="workers-models">{columns.models}</span>
        <span>{columns.now}</span>
        <span className="workers-load">{columns.load}</span>
        <span className="workers-seen">{columns.seen}</span>
        <span />
      </div>
      <ul aria-label={label}>
        {workers.map((worker) => (
          <Row key={worker.worker_id} worker={worker} ask={ask} withFleet={withFleet} />
        ))}
      </ul>
    </div>
  )
}

interface RowProps {
  worker: WorkerSeen
  ask: Ask
  withFleet: boolean
}

const Row = memo(function Row({ worker, ask, withFleet }: RowProps) {
  const condition = conditionOf(worker)
  const name = worker.worker_id
  return (
    <li className="workers-row" aria-label={name}>
      <span className="workers-state">
        <Status status={STATE_OF[condition]}>{words.conditions[condition]}</Status>
      </span>
      <span className="workers-name">
        <Link href={`/console/workers/${encodeURIComponent(name)}`}>{name}</Link>
        <Badge>
          {withFleet ? worker.fleet : worker.gpu ? gpuName(worker.gpu) : (worker.backend_kind ?? words.noGpu)}
        </Badge>
      </span>
      <span className="workers-memory">
        <GpuMemory worker={worker} />
      </span>
      <span className="workers-models cut-text quiet" title={worker.models_loaded.join("\n") || undefined}>
        {worker.models_loaded.length > 0 ? worker.models_loaded.map(modelName).join(", ") : words.noModels}
      </span>
      <span className="workers-now">
        <Now worker={worker} condition={condition} />
      </span>
      <span className="workers-load">{condition !== "revoked" && <LoadSpark worker={worker} />}</span>
      <span className="workers-seen faint">
        <Time at={worker.last_seen_at} />
      </span>
      <span className="workers-acts">
        <WorkerButtons name={name} condition={condition} ask={ask} />
      </span>
    </li>
  )
})

export function GpuMemory({ worker }: { worker: WorkerSeen }) {
  const { reading } = worker
  const total = reading?.gpu_memory_total_bytes ?? worker.gpu_memory_bytes
  const used = reading?.gpu_memory_used_bytes
  const degrees = reading?.gpu_temperature_celsius
  const facts: ReactNode[] = []
  if (total)
    facts.push(used == null ? `${gigabytes(total)} GB` : `${gigabytes(used)} / ${gigabytes(total)} GB`)
  if (degrees != null) facts.push(words.celsius(degrees))
  return (
    <>
      {total && used != null && (
        <Progress label={words.memoryOf(worker.worker_id)} value={used / total} state="ink" />
      )}
      {facts.length > 0 ? (
        <Badge>{facts.join(" · ")}</Badge>
      ) : (
        // Phones show no column headings, so a dash would be meaningless there.
        <span className="wide-only">
          <Badge>–</Badge>
        </span>
      )}
    </>
  )
}

const CONDITION_TEXT: Readonly<Record<Exclude<Condition, "busy" | "silent">, string>> = {
  pending: words.waitsForApproval,
  draining: words.finished,
  idle: words.waitsForWork,
  faulty: words.conditions.faulty,
  offline: words.lost,
  revoked: words.shutOut,
}

export function Now({ worker, condition }: { worker: WorkerSeen; condition: Condition }) {
  const job = runningJob(worker)
  if (condition === "silent" && worker.silent_since)
    return (
      <span className="is-failed">
        {words.silent} <Time at={worker.silent_since} />
      </span>
    )
  if (!job)
    return (
      <span className={condition === "offline" || condition === "faulty" ? "is-failed" : "faint"}>
        {condition === "faulty" && worker.problem
          ? worker.problem
          : condition === "busy" || condition === "silent"
            ? words.preparing
            : CONDITION_TEXT[condition]}
      </span>
    )
  return (
    <>
      <span className="workers-job">
        <Link href={`/console/jobs/${job.job_id}`} className="mono" title={job.job_id}>
          {shortId(job.job_id)}
        </Link>
        <span className="cut-text quiet" title={job.node ?? undefined}>
          {job.workflow}
        </span>
        {worker.jobs.length > 1 && <Badge>+{worker.jobs.length - 1}</Badge>}
      </span>
      <Progress
        label={words.progressOf(shortId(job.job_id))}
        value={job.percent === null ? null : job.percent / 100}
        withPercent
      />
    </>
  )
}

const READINGS_FRESH_SECONDS = 45
const POINTS = 60

/** The GPU's load during the last hour, or the machine's load if no GPU reports any. It is read
 * once the row is visible. */
function LoadSpark({ worker }: { worker: WorkerSeen }) {
  const box = useRef<HTMLSpanElement>(null)
  const [isSeen, setSeen] = useState(false)
  useEffect(() => {
    if (!box.current || isSeen) return undefined
    const observer = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) setSeen(true)
    })
    observer.observe(box.current)
    return () => observer.disconnect()
  }, [isSeen])
  const path = isSeen && worker.read_at ? `${WORKERS}/${encodeURIComponent(worker.worker_id)}/readings` : null
  const query = useQuery<Readings>(path, {
    query: { hours: 1, points: POINTS },
    freshSeconds: READINGS_FRESH_SECONDS,
  })
  const { reload } = query
  // biome-ignore lint/correctness/useExhaustiveDependencies: reads again once the worker has sent a new report
  useEffect(() => {
    if (isSeen) reload()
  }, [worker.read_at])
  const readings = [...(query.data?.readings ?? [])].reverse()
  const hasGpu = readings.some((reading) => reading.reading.gpu_load_percent != null)
  const values = readings.map(({ reading }) =>
    hasGpu ? (reading.gpu_load_percent ?? null) : (reading.cpu_percent ?? null),
  )
  const latest = values.findLast((value) => value !== null) ?? null
  const load = latest === null ? null : percent(Math.round(latest))
  return (
    <span ref={box} className="workers-spark">
      {values.length > 1 ? (
        <Plot
          spark
          height={26}
          range={[0, 100]}
          label={(hasGpu ? words.gpuOver : words.machineOver)(worker.worker_id, load)}
          moments={readings.map((reading) => Date.parse(reading.at) / 1000)}
          series={[{ label: words.columns.load, values }]}
        />
      ) : (
        <span className="faint">{load ?? "–"}</span>
      )}
    </span>
  )
}
