/** Prepares the data for the overview's plots and alerts. */

import type { Alert, Overview, WorkflowFigures } from "@/api/schema"
import { count, duration, percent } from "@/ui"
import type { Series } from "@/ui/Plot"
import { words } from "@/words/en/overview"

export type Range = "1h" | "24h" | "7d"
export const RANGES: readonly Range[] = ["1h", "24h", "7d"]

export interface Figure {
  readonly key: string
  readonly title: string
  readonly value: string
  readonly unit: string
  readonly series: readonly Series[]
  readonly format: (value: number) => string
  readonly range?: readonly [number, number]
  readonly whole?: boolean
}

const share = (value: number | null) => (value === null ? words.noValue : percent(value))
const time = (value: number | null) => (value === null ? words.noValue : duration(value))
const whole = (value: number) => percent(Math.round(value))
const hundredth = (value: number | null) => (value === null ? null : value * 100)

const compact = new Intl.NumberFormat(undefined, { notation: "compact", maximumFractionDigits: 1 })
const brief = (value: number) => (value < 10_000 ? count(value) : compact.format(value))

/** Returns a range that starts at the multiple of ten below the lowest value, so that a fall
 * from 100 to 98 is visible. */
export function shareRange(values: readonly (number | null)[]): [number, number] {
  const numbers = values.filter((value) => value !== null)
  const low = Math.min(95, ...numbers)
  return [Math.max(0, Math.floor((low - 1) / 10) * 10), 100]
}

export function figuresOf({ now, series, totals, range }: Overview): Figure[] {
  const { finished, p50, p95, busy, switches, tokens } = words
  const rates = series.success_rate.map(hundredth)
  const runs = totals.stayed + totals.switched
  return [
    {
      key: "queue",
      title: words.queue.title,
      value: brief(now.queued),
      unit: words.queue.unit,
      series: [{ label: words.queue.series, values: series.queued, colour: 1 }],
      format: brief,
      whole: true,
    },
    {
      key: "finished",
      title: finished.title,
      value: brief(totals.completed + totals.failed),
      unit: words.inRange[range as Range],
      series: [
        { label: finished.ok, values: series.completed, colour: 3 },
        { label: finished.failed, values: series.failed, colour: 4, dashed: true },
      ],
      format: brief,
      whole: true,
    },
    {
      key: "wait",
      title: words.wait.title,
      value: time(totals.wait_p50_seconds),
      unit: p50,
      series: [
        { label: p50, values: series.wait_p50_seconds, colour: 2 },
        { label: p95, values: series.wait_p95_seconds, colour: 2, dashed: true },
      ],
      format: duration,
    },
    {
      key: "run",
      title: words.run.title,
      value: time(totals.run_p50_seconds),
      unit: p50,
      series: [
        { label: p50, values: series.run_p50_seconds, colour: 2 },
        { label: p95, values: series.run_p95_seconds, colour: 2, dashed: true },
      ],
      format: duration,
    },
    {
      key: "succeeded",
      title: words.succeeded.title,
      value: share(hundredth(totals.success_rate)),
      unit: words.succeeded.unit,
      series: [{ label: words.succeeded.title, values: rates, colour: 3 }],
      format: whole,
      range: shareRange(rates),
    },
    {
      key: "busy",
      title: busy.title,
      value: share(totals.busy_percent),
      unit: busy.unit,
      series: [
        { label: busy.slots, values: series.busy_percent, colour: 1 },
        { label: busy.gpu, values: series.gpu_percent, colour: 2, dashed: true },
      ],
      format: whole,
      range: [0, 100],
    },
    {
      key: "switches",
      title: switches.title,
      value: runs > 0 ? percent(Math.round((totals.stayed / runs) * 100)) : words.noValue,
      unit: switches.unit,
      series: [
        { label: switches.stayed, values: series.stayed, colour: 3 },
        { label: switches.switched, values: series.switched, colour: 4, dashed: true },
      ],
      format: brief,
      whole: true,
    },
    {
      key: "tokens",
      title: tokens.title,
      value: brief(totals.tokens),
      unit: tokens.unit,
      series: [{ label: tokens.series, values: series.tokens, colour: 1 }],
      format: brief,
      whole: true,
    },
  ]
}

export type AlertAct =
  | { kind: "approve" | "pause"; name: string; label: string }
  | { kind: "maintenance"; label: string }
  | { kind: "link"; href: string; label: string }

function subjectOf(alert: Alert, kind: string): string | null {
  return alert.subject?.startsWith(`${kind}:`) ? alert.subject.slice(kind.length + 1) : null
}

const link = (href: string, label: string): AlertAct => ({ kind: "link", href, label })

/** Returns the actions that resolve an alert, with the main one first. */
export function actsOf(alert: Alert): AlertAct[] {
  const { acts } = words
  const worker = subjectOf(alert, "worker")
  const workflow = subjectOf(alert, "workflow")
  const workerHref = worker ? `/console/workers/${encodeURIComponent(worker)}` : "/console/workers"
  const jobs = `/console/jobs?status=failed${workflow ? `&workflow=${encodeURIComponent(workflow)}` : ""}&since=24h`
  if (alert.kind === "workers_pending")
    return worker
      ? [{ kind: "approve", name: worker, label: acts.approve }, link(workerHref, acts.look)]
      : [link(workerHref, acts.look)]
  if (alert.kind === "error_rate")
    return [
      link(jobs, acts.errors),
      ...(workflow ? [{ kind: "pause", name: workflow, label: acts.pause } as const] : []),
    ]
  if (alert.kind === "stuck_jobs")
    return alert.severity === "error"
      ? [link("/console/workers?view=matrix", acts.matrix)]
      : [link("/console/queue", acts.queue)]
  if (alert.kind === "poisoned_jobs") return [link(jobs, acts.errors)]
  if (alert.kind === "maintenance") return [{ kind: "maintenance", label: acts.maintenance }]
  if (alert.kind === "workers_lost" || (alert.kind === "disk" && worker)) return [link(workerHref, acts.look)]
  return []
}

/** Puts alerts that require a decision by the operator first. The others keep the API's order,
 * worst first. */
export function alertsInOrder(alerts: readonly Alert[]): Alert[] {
  const rank = (alert: Alert) => (alert.kind === "workers_pending" ? 0 : 1)
  return [...alerts].sort((a, b) => rank(a) - rank(b))
}

export function successOf({ completed, failed }: WorkflowFigures): number | null {
  return completed + failed > 0 ? (completed / (completed + failed)) * 100 : null
}
