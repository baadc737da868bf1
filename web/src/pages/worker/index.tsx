/** The worker page, with the worker's properties, jobs, machine load over time, and the workflows
 * that it can run. */

import { type ReactNode, useEffect, useState } from "react"
import { Link } from "wouter"
import { useQuery } from "@/api"
import type { Matrix, Reading, ReadingAnswer, Readings, WorkerDetail, WorkerSeen } from "@/api/schema"
import { useQuestions, WorkerButtons } from "@/pages/workers/acts"
import { conditionOf, GIGABYTE, gigabytes, missingFor, modelName, STATE_OF } from "@/pages/workers/machines"
import { useMatrix, useWorkers, WORKERS } from "@/pages/workers/useMachines"
import { Now } from "@/pages/workers/WorkerRows"
import {
  Badge,
  Choices,
  Crumb,
  count,
  Empty,
  LinkButton,
  Loaded,
  Page,
  Panel,
  percent,
  Skeleton,
  StateIcon,
  Status,
  Time,
} from "@/ui"
import { Plot } from "@/ui/Plot"
import { words } from "@/words/en/workers"
import "@/pages/workers/workers.css"
import "./worker.css"

export default function WorkerPage({ id: name }: { id: string }) {
  const path = `${WORKERS}/${encodeURIComponent(name)}`
  const detail = useQuery<WorkerDetail>(path, { freshSeconds: 2 })
  const workers = useWorkers()
  const matrix = useMatrix().data
  const questions = useQuestions()
  const seen = workers.data?.workers.find((worker) => worker.worker_id === name)
  const condition = seen && conditionOf(seen)
  if (detail.error?.status === 404 && !detail.data)
    return (
      <Page title={name}>
        <Empty
          title={words.one.gone}
          act={
            <LinkButton kind="go" href="/console/workers">
              {words.one.goneAct}
            </LinkButton>
          }
        >
          {words.one.goneText}
        </Empty>
      </Page>
    )
  return (
    <Page
      title={name}
      className="worker"
      aside={
        condition && (
          <Status status={STATE_OF[condition]} pill>
            {words.conditions[condition]}
          </Status>
        )
      }
      actions={
        condition && <WorkerButtons name={name} condition={condition} ask={questions.ask} size="normal" />
      }
    >
      <Crumb href="/console/workers" list={words.one.crumb}>
        <span className="mono">{name}</span>
      </Crumb>
      <Loaded query={detail} skeleton={<Skeleton height="420px" />}>
        {(worker) => (
          <>
            <Facts worker={worker} seen={seen} />
            <div className="worker-two">
              <Panel title={words.one.now}>
                <div className="worker-now">
                  {seen && condition && <Now worker={seen} condition={condition} />}
                </div>
              </Panel>
              <CanRun worker={worker} matrix={matrix} />
            </div>
            <ReadingPlots path={path} readAt={seen?.read_at ?? null} />
            <Models worker={worker} />
          </>
        )}
      </Loaded>
      {questions.dialogs}
    </Page>
  )
}

function Facts({ worker, seen }: { worker: WorkerDetail; seen: WorkerSeen | undefined }) {
  const { one } = words
  const { backend } = worker
  const memory = backend?.gpu_memory_bytes
  const restarts = seen?.reading?.comfyui_restarts
  const facts: [string, ReactNode][] = [
    [
      one.fleet,
      <Link key="fleet" href={`/console/fleets#${worker.fleet}`}>
        {worker.fleet}
      </Link>,
    ],
    [one.backend, backend ? [backend.kind, backend.version].filter(Boolean).join(" ") : words.noGpu],
    [
      one.gpu,
      backend?.gpu ? [backend.gpu, memory && `${gigabytes(memory)} GB`].filter(Boolean).join(", ") : "–",
    ],
    [one.at, one.atOnce(seen?.current_load ?? worker.current_load, worker.max_concurrency)],
    [one.providers, worker.providers.join(", ")],
    [one.capabilities, worker.capabilities.join(", ") || "–"],
    ...(restarts == null ? [] : [[one.restarts, count(restarts)] satisfies [string, ReactNode]]),
    [one.since, <Time key="since" at={worker.created_at} />],
    [one.seen, <Time key="seen" at={seen?.last_seen_at ?? worker.last_seen_at} />],
  ]
  return (
    <dl className="worker-facts" aria-label={one.facts}>
      {facts.map(([label, value]) => (
        <div key={label}>
          <dt>{label}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  )
}

function CanRun({ worker, matrix }: { worker: WorkerDetail; matrix: Matrix | undefined }) {
  const row = matrix?.workers.find((other) => other.worker_id === worker.worker_id)
  const able = row ? row.can_run.length : worker.workflows.length
  return (
    <Panel title={words.one.runs} aside={<Badge>{words.one.atOnce(able, worker.workflows.length)}</Badge>}>
      {worker.workflows.length === 0 && <p className="worker-none">{words.one.runsNone}</p>}
      <ul className="worker-runs">
        {worker.workflows.map((workflow) => {
          const lack = row ? missingFor(row, workflow) : []
          const isUnknown = row?.unknown.includes(workflow)
          return (
            <li key={workflow}>
              <StateIcon state={lack.length > 0 ? "failed" : isUnknown ? "queued" : "succeeded"} />
              <Link href={`/console/workflows/${encodeURIComponent(workflow)}`}>{workflow}</Link>
              <span className={lack.length > 0 ? "is-failed" : "faint"}>
                {lack.length > 0
                  ? words.one.lacks(lack.join(", "))
                  : isUnknown
                    ? words.one.notTold
                    : words.one.can}
              </span>
            </li>
          )
        })}
      </ul>
    </Panel>
  )
}

interface Kind {
  title: string
  value: (reading: Reading) => number | null | undefined
  format: (value: number) => string
  range?: readonly [number, number]
}

const part = (value: number) => percent(Math.round(value))
/** Converts bytes to gigabytes, so that the grid lines are at round values. */
const inGigabytes = (value: number | null | undefined) => (value == null ? null : value / GIGABYTE)
const size = (value: number) => `${gigabytes(value * GIGABYTE)} GB`
const KINDS: readonly Kind[] = [
  { title: words.one.gpuLoad, value: (reading) => reading.gpu_load_percent, format: part, range: [0, 100] },
  {
    title: words.one.gpuMemory,
    value: (reading) => inGigabytes(reading.gpu_memory_used_bytes),
    format: size,
  },
  {
    title: words.one.temperature,
    value: (reading) => reading.gpu_temperature_celsius,
    format: words.celsius,
  },
  { title: words.one.cpu, value: (reading) => reading.cpu_percent, format: part, range: [0, 100] },
  { title: words.one.memory, value: (reading) => inGigabytes(reading.memory_used_bytes), format: size },
  { title: words.one.disk, value: (reading) => inGigabytes(reading.disk_free_bytes), format: size },
]
const HOURS = Object.entries(words.one.hours).map(([value, label]) => ({ value, label }))
const POINTS = 240

function ReadingPlots({ path, readAt }: { path: string; readAt: string | null }) {
  const [hours, setHours] = useState("1")
  const query = useQuery<Readings>(`${path}/readings`, { query: { hours, points: POINTS }, freshSeconds: 10 })
  const { reload } = query
  // biome-ignore lint/correctness/useExhaustiveDependencies: reads again once the worker has sent a new report
  useEffect(() => reload(), [readAt])
  return (
    <section aria-label={words.one.readings}>
      <div className="worker-head">
        <h2>{words.one.readings}</h2>
        <Choices hideLabel label={words.one.ranges} options={HOURS} value={hours} onChange={setHours} />
      </div>
      <Loaded query={query} skeleton={<Skeleton height="180px" />}>
        {({ readings }) => <Plots readings={[...readings].reverse()} hours={Number(hours)} />}
      </Loaded>
    </section>
  )
}

function Plots({ readings, hours }: { readings: readonly ReadingAnswer[]; hours: number }) {
  const kinds = KINDS.map((kind) => ({
    ...kind,
    values: readings.map((reading) => kind.value(reading.reading) ?? null),
  })).filter((plot) => plot.values.some((value) => value !== null))
  if (kinds.length === 0) return <p className="worker-none">{words.one.noReadings}</p>
  const moments = readings.map((reading) => Date.parse(reading.at) / 1000)
  return (
    <div className="worker-plots">
      {kinds.map(({ title, values, format, range }) => {
        const latest = values.findLast((value) => value !== null) ?? 0
        return (
          <Panel key={title}>
            <div className="worker-plot">
              <h3>{title}</h3>
              <b>{format(latest)}</b>
              <Plot
                label={`${title}: ${format(latest)}`}
                moments={moments}
                series={[{ label: title, values }]}
                height={110}
                spanSeconds={hours * 3600}
                format={format}
                {...(range && { range })}
              />
            </div>
          </Panel>
        )
      })}
    </div>
  )
}

function Models({ worker }: { worker: WorkerDetail }) {
  const folders = Object.entries(worker.backend?.model_files ?? {}).filter(([, files]) => files.length > 0)
  const loaded = new Set(worker.models_loaded)
  return (
    <Panel
      title={words.one.models}
      aside={<Badge>{words.one.nodeTypes(worker.backend?.node_types?.length ?? 0)}</Badge>}
    >
      {folders.length === 0 && <p className="worker-none">{words.one.modelsNone}</p>}
      {folders.map(([folder, files]) => (
        <details key={folder} className="worker-folder">
          <summary>
            {folder} <Badge>{count(files.length)}</Badge>
          </summary>
          <ul>
            {files.map((file) => (
              <li key={file} title={file}>
                <span className="mono">{modelName(file)}</span>
                {loaded.has(file) && <Badge>{words.one.loaded}</Badge>}
              </li>
            ))}
          </ul>
        </details>
      ))}
    </Panel>
  )
}
