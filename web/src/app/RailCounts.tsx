/** Reads the counts in the console's navigation, and keeps them up to date. It is loaded after
 * the page itself. */

import { useEffect, useState } from "react"
import { useEvents, useQuery } from "@/api"
import type { AdminEffects, Alert, Fleets, Overview, OverviewNow, Tenants, Workflows } from "@/api/schema"
import { putConsoleCounts } from "./consoleCounts"

const LATELY = { freshSeconds: 300 }
const LATER_MS = 600

/** Waits before it reads the counts, so that the page's own requests go first. */
export default function RailCounts() {
  const [isTime, setTime] = useState(false)
  useEffect(() => {
    const timer = setTimeout(() => setTime(true), LATER_MS)
    return () => clearTimeout(timer)
  }, [])
  return isTime ? <Counts /> : null
}

function Counts() {
  const overview = useQuery<Overview>("/api/admin/overview", {
    query: { range: "1h" },
    freshSeconds: 10,
  }).data
  const fleets = useQuery<Fleets>("/api/admin/fleets", LATELY).data?.fleets.length
  const workflows = useQuery<Workflows>("/api/admin/workflows", LATELY).data?.workflows.length
  const effects = useQuery<AdminEffects>("/api/admin/effects", LATELY).data?.effects.length
  const tenants = useQuery<Tenants>("/api/admin/tenants", LATELY).data?.tenants.length
  useEffect(() => {
    if (overview) putNow(overview.now)
    if (overview) putPending(overview.alerts)
  }, [overview])
  useEffect(() => {
    if (fleets !== undefined) putConsoleCounts({ fleets })
    if (workflows !== undefined) putConsoleCounts({ workflows })
    if (effects !== undefined) putConsoleCounts({ effects })
    if (tenants !== undefined) putConsoleCounts({ tenants })
  }, [fleets, workflows, effects, tenants])
  useEvents<OverviewNow & { alerts: Alert[] }>("/api/admin/events", (data, { event }) => {
    if (event === "counts") putNow(data)
    if (event === "alerts") putPending(data.alerts)
  })
  return null
}

function putNow({ queued, workers: { revoked: _out, ...workers } }: OverviewNow): void {
  putConsoleCounts({ queued, workers: Object.values(workers).reduce((sum, number) => sum + number, 0) })
}

function putPending(alerts: readonly Alert[]): void {
  const waiting = alerts.filter((alert) => alert.kind === "workers_pending")
  putConsoleCounts({ pending: waiting.reduce((sum, alert) => sum + alert.count, 0) })
}
