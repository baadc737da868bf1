import { expect, test } from "vitest"
import type { Alert, AlertKind } from "@/api/schema"
import { actsOf, alertsInOrder, shareRange, successOf } from "./figures"

function alert(kind: AlertKind, subject: string | null = null, changes: Partial<Alert> = {}): Alert {
  return { kind, severity: "error", message: "m", todo: "t", subject, count: 1, ...changes }
}

test("each alert offers an action that resolves it", () => {
  expect(actsOf(alert("workers_pending", "worker:gpu 7"))).toMatchObject([
    { kind: "approve", name: "gpu 7" },
    { kind: "link", href: "/console/workers/gpu%207" },
  ])
  expect(actsOf(alert("workers_pending"))).toMatchObject([{ kind: "link", href: "/console/workers" }])
  expect(actsOf(alert("error_rate", "workflow:relight"))).toMatchObject([
    { href: "/console/jobs?status=failed&workflow=relight&since=24h" },
    { kind: "pause", name: "relight" },
  ])
  expect(actsOf(alert("stuck_jobs", "workflow:x"))).toMatchObject([{ href: "/console/workers?view=matrix" }])
  expect(actsOf(alert("stuck_jobs", "workflow:x", { severity: "warning" }))).toMatchObject([
    { href: "/console/queue" },
  ])
  expect(actsOf(alert("maintenance"))).toMatchObject([{ kind: "maintenance" }])
  expect(actsOf(alert("pool_down", "pool:a"))).toEqual([])
})

test("alerts that wait for a person come first", () => {
  const ordered = alertsInOrder([alert("disk"), alert("error_rate"), alert("workers_pending")])
  expect(ordered.map((alert) => alert.kind)).toEqual(["workers_pending", "disk", "error_rate"])
})

test("the success plot starts below its lowest value", () => {
  expect(shareRange([100, 100, null])).toEqual([90, 100])
  expect(shareRange([100, 72])).toEqual([70, 100])
  expect(shareRange([0, 100])).toEqual([0, 100])
})

test("a workflow without finished jobs has no success rate", () => {
  const times = { mean_run_seconds: null, wait_p95_seconds: null, run_p95_seconds: null }
  const figures = { workflow: "a", cancelled: 0, ...times, ended: [], queued: 1, running: 0, held: 0 }
  expect(successOf({ ...figures, completed: 0, failed: 0 })).toBeNull()
  expect(successOf({ ...figures, completed: 3, failed: 1 })).toBe(75)
})
