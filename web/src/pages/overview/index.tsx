/** The console's start page: recent activity, the workers' current jobs, and anything that needs an
 * operator. */

import { useEffect, useState } from "react"
import { Link, useLocation, useSearch } from "wouter"
import { api, cache, pathOf, useEvents, useQuery } from "@/api"
import type { Alert, Overview, OverviewNow, WorkflowFigures, Workflows } from "@/api/schema"
import { notifyFailed, setPaused } from "@/pages/jobs/BulkBar"
import { approve } from "@/pages/workers/acts"
import { busyCount, countOf } from "@/pages/workers/machines"
import { EVENTS, readAgain, useWorkers } from "@/pages/workers/useMachines"
import {
  Badge,
  Button,
  Choices,
  count,
  duration,
  LinkButton,
  Loaded,
  Page,
  Panel,
  percent,
  Skeleton,
  StateIcon,
  toast,
} from "@/ui"
import { Plot } from "@/ui/Plot"
import { words } from "@/words/en/overview"
import { ContactSheet } from "./ContactSheet"
import {
  type AlertAct,
  actsOf,
  alertsInOrder,
  type Figure,
  figuresOf,
  RANGES,
  type Range,
  successOf,
} from "./figures"
import "./overview.css"

const OVERVIEW = "/api/admin/overview"
const READ_MS = 5_000
const CHOICES = RANGES.map((value) => ({ value, label: words.ranges[value] }))

export default function OverviewPage() {
  const search = useSearch()
  const [, go] = useLocation()
  const range = RANGES.find((span) => span === new URLSearchParams(search).get("range")) ?? "1h"
  const overview = useOverview(range)
  const workers = useWorkers()
  const all = workers.data?.workers ?? []
  const [withPreviews, setPreviews] = useState(false)
  return (
    <Page
      title={words.title}
      className="overview"
      actions={
        <Choices
          hideLabel
          label={words.range}
          options={CHOICES}
          value={range}
          onChange={(next) => go(next === "1h" ? "/console" : `/console?range=${next}`, { replace: true })}
        />
      }
    >
      <Loaded query={overview} skeleton={<Coming />}>
        {(overview) => (
          <>
            <Plots overview={overview} />
            <div className="overview-two">
              <Panel
                className="overview-workers"
                title={
                  <>
                    {words.workers}{" "}
                    <small>
                      {workers.data &&
                        words.workersFacts(
                          busyCount(all),
                          countOf(all, "idle"),
                          countOf(all, "pending"),
                          countOf(all, "offline"),
                        )}
                    </small>
                  </>
                }
                aside={
                  <span className="row">
                    <Button
                      size="small"
                      aria-pressed={withPreviews}
                      title={words.previewsText}
                      onClick={() => setPreviews(!withPreviews)}
                    >
                      {withPreviews ? words.hidePreviews : words.showPreviews}
                    </Button>
                    <LinkButton size="small" kind="ghost" href="/console/workers">
                      {words.allWorkers(all.length)}
                    </LinkButton>
                  </span>
                }
              >
                <Loaded query={workers} skeleton={<Skeleton height="200px" />}>
                  {({ workers }) => <ContactSheet workers={workers} withPreviews={withPreviews} />}
                </Loaded>
              </Panel>
              <Alerts alerts={alertsInOrder(overview.alerts)} />
            </div>
            <ByWorkflow overview={overview} />
          </>
        )}
      </Loaded>
    </Page>
  )
}

function useOverview(range: Range) {
  const overview = useQuery<Overview>(OVERVIEW, { query: { range }, freshSeconds: 2 })
  const { reload } = overview
  useEffect(() => {
    const timer = setInterval(() => {
      if (document.visibilityState === "visible") reload()
    }, READ_MS)
    return () => clearInterval(timer)
  }, [reload])
  useEvents<OverviewNow & { alerts: Alert[] }>(EVENTS, (data, { event }) => {
    if (event !== "counts" && event !== "alerts") return
    cache.set<Overview>(pathOf(OVERVIEW, { range }), (old) => {
      if (!old) return old
      return event === "counts" ? { ...old, now: data } : { ...old, alerts: data.alerts }
    })
  })
  return overview
}

function Coming() {
  return (
    <div className="stack">
      <Skeleton height="340px" />
      <Skeleton height="260px" />
    </div>
  )
}

function Plots({ overview }: { overview: Overview }) {
  const moments = overview.series.at.map((moment) => Date.parse(moment) / 1000)
  return (
    <section className="overview-plots" aria-label={words.plots}>
      {figuresOf(overview).map((figure) => (
        <OnePlot key={figure.key} figure={figure} moments={moments} />
      ))}
    </section>
  )
}

function OnePlot({ figure, moments }: { figure: Figure; moments: readonly number[] }) {
  const { title, value, unit, series, format, range, whole = false } = figure
  return (
    <section className="panel overview-plot" aria-label={title}>
      <header>
        <h3>{title}</h3>
        {series.length > 1 && (
          <span className="overview-legend" aria-hidden="true">
            {series.map((plot) => (
              <span
                key={plot.label}
                className={`overview-key plot-${plot.colour}${plot.dashed ? " is-dashed" : ""}`}
              >
                {plot.label}
              </span>
            ))}
          </span>
        )}
      </header>
      <p className="overview-value">
        <b>{value}</b> <span>{unit}</span>
      </p>
      <Plot
        label={`${title}: ${value} ${unit}`}
        moments={moments}
        series={series}
        height={104}
        format={format}
        whole={whole}
        {...(range && { range })}
      />
    </section>
  )
}

function Alerts({ alerts }: { alerts: readonly Alert[] }) {
  const run = (act: AlertAct) => {
    if (act.kind === "approve") return approve(act.name)
    if (act.kind === "pause") return setPaused(act.name, true)
    if (act.kind === "maintenance") return endMaintenance()
    return Promise.resolve()
  }
  return (
    <Panel className="overview-look" title={words.look} aside={<Badge>{alerts.length}</Badge>}>
      {alerts.length === 0 && (
        <p className="overview-none">
          <StateIcon state="succeeded" /> {words.nothing}
        </p>
      )}
      <ul>
        {alerts.map((alert) => (
          <li key={`${alert.kind} ${alert.subject} ${alert.message}`} className="overview-alert">
            <StateIcon state={stateOfAlert(alert)} size={18} />
            <div>
              <strong>{alert.message}</strong>
              <p>{alert.todo}</p>
            </div>
            <span className="overview-acts">
              {actsOf(alert).map((act) =>
                act.kind === "link" ? (
                  <LinkButton key={act.label} size="small" href={act.href}>
                    {act.label}
                  </LinkButton>
                ) : (
                  <Button
                    key={act.label}
                    size="small"
                    kind={act.kind === "approve" ? "go" : "plain"}
                    onClick={() => void run(act).catch(notifyFailed)}
                  >
                    {act.label}
                  </Button>
                ),
              )}
            </span>
          </li>
        ))}
      </ul>
    </Panel>
  )
}

function stateOfAlert(alert: Alert): "waiting" | "failed" | "cancelled" {
  if (alert.kind === "workers_pending") return "waiting"
  return alert.severity === "error" ? "failed" : "cancelled"
}

async function endMaintenance(): Promise<void> {
  await api.post("/api/admin/maintenance", { on: false })
  toast({ title: words.maintenanceOff })
  readAgain()
}

const BAD_SHARE = 50
const SPARK_HEIGHT = 24

/** Shows the number of finished jobs over time. */
function Ended({ figures, moments }: { figures: WorkflowFigures; moments: readonly number[] }) {
  const success = successOf(figures)
  const isBad = success !== null && success < BAD_SHARE
  return (
    <Plot
      spark
      whole
      height={SPARK_HEIGHT}
      label={words.endedOver(figures.workflow, figures.completed + figures.failed)}
      moments={moments}
      series={[{ label: words.columns.finished, values: figures.ended, colour: isBad ? 4 : 3 }]}
    />
  )
}

function time(seconds: number | null): string {
  return seconds === null ? words.noValue : duration(seconds)
}

function ByWorkflow({ overview }: { overview: Overview }) {
  const workflows = useQuery<Workflows>("/api/admin/workflows", { freshSeconds: 10 }).data?.workflows
  const paused = new Map(workflows?.map((workflow) => [workflow.slug, workflow.is_paused]))
  const { columns } = words
  const moments = overview.series.at.map((moment) => Date.parse(moment) / 1000)
  return (
    <Panel
      className="overview-flows"
      title={
        <>
          {words.byWorkflow} <small>{words.byWorkflowIn[overview.range as Range]}</small>
        </>
      }
      aside={
        <LinkButton size="small" kind="ghost" href="/console/workflows">
          {words.all}
        </LinkButton>
      }
    >
      {overview.workflows.length === 0 ? (
        <p className="overview-none">{words.noWorkflows}</p>
      ) : (
        <table>
          <thead>
            <tr>
              <th scope="col">{columns.workflow}</th>
              <th scope="col">{columns.waiting}</th>
              <th scope="col" className="wide-only">
                {columns.running}
              </th>
              <th scope="col">{columns.finished}</th>
              <td className="overview-spark wide-only" />
              <th scope="col">{columns.failed}</th>
              <th scope="col" className="wide-only">
                {columns.wait}
              </th>
              <th scope="col" className="wide-only">
                {columns.run}
              </th>
              <th scope="col" className="wide-only">
                {columns.runMost}
              </th>
              <th scope="col" className="wide-only">
                {columns.succeeded}
              </th>
              <td />
            </tr>
          </thead>
          <tbody>
            {overview.workflows.map((workflow) => {
              const success = successOf(workflow)
              const name = workflow.workflow
              return (
                <tr key={name}>
                  <th scope="row">
                    <Link href={`/console/workflows/${encodeURIComponent(name)}`}>{name}</Link>
                  </th>
                  <td>{count(workflow.queued)}</td>
                  <td className="wide-only">{count(workflow.running)}</td>
                  <td>{count(workflow.completed + workflow.failed)}</td>
                  <td className="overview-spark wide-only">
                    <Ended figures={workflow} moments={moments} />
                  </td>
                  <td>{count(workflow.failed)}</td>
                  <td className="wide-only">{time(workflow.wait_p95_seconds)}</td>
                  <td className="wide-only">{time(workflow.mean_run_seconds)}</td>
                  <td className="wide-only">{time(workflow.run_p95_seconds)}</td>
                  <td
                    className={success !== null && success < BAD_SHARE ? "wide-only is-failed" : "wide-only"}
                  >
                    {success === null ? words.noValue : percent(success)}
                  </td>
                  <td>
                    {paused.has(name) && (
                      <Button
                        size="small"
                        kind="ghost"
                        label={paused.get(name) ? words.resumeOne(name) : words.pauseOne(name)}
                        onClick={() => void setPaused(name, !paused.get(name)).catch(notifyFailed)}
                      >
                        {paused.get(name) ? words.resume : words.pause}
                      </Button>
                    )}
                  </td>
                </tr>
              )
            })}
          </tbody>
        </table>
      )}
    </Panel>
  )
}
