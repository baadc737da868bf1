/** Runs a graph again from one node and keeps the earlier results. Also links to the original
 * run and to later ones. */

import { Link, useLocation } from "wouter"
import { api, cache, useAct, useQuery } from "@/api"
import type { GraphRunAnswer, GraphRunSummaries } from "@/api/schema"
import { Button, ErrorNote, Time } from "@/ui"
import { words } from "@/words/en/canvas"

export function RunAgain({ run, node }: { run: GraphRunAnswer; node: string }) {
  const [, go] = useLocation()
  const start = useAct(async () => {
    const idempotencyKey = crypto.randomUUID()
    const body = { from: node }
    const newRun = await api.post<GraphRunAnswer>(`/api/graph-runs/${run.id}/rerun`, body, { idempotencyKey })
    cache.invalidate("/api/graph-runs")
    go(`/graphs/${newRun.graph_id}/runs/${newRun.id}`)
  })
  return (
    <div>
      <Button size="small" busy={start.isRunning} onClick={() => void start.run()}>
        {words.again}
      </Button>
      <p className="faint">{words.againHint}</p>
      {start.error && <ErrorNote error={start.error} />}
    </div>
  )
}

export function EarlierRun({ run }: { run: GraphRunAnswer }) {
  if (!run.rerun_of) return null
  return (
    <p className="canvas-problems">
      <span className="canvas-problem">{words.againOf(run.rerun_of.node)}</span>
      <Link href={`/graphs/${run.graph_id}/runs/${run.rerun_of.run_id}`}>{words.earlierRun}</Link>
    </p>
  )
}

const RERUNS_SHOWN_MAX = 5

export function LaterRuns({ run }: { run: GraphRunAnswer }) {
  const query = { rerun_of: run.id, limit: RERUNS_SHOWN_MAX }
  const later = useQuery<GraphRunSummaries>("/api/graph-runs", { query }).data?.runs ?? []
  if (later.length === 0) return null
  return (
    <p className="canvas-problems">
      <span className="canvas-problem">{words.laterRuns}</span>
      {later.map((rerun) => (
        <Link key={rerun.id} href={`/graphs/${rerun.graph_id}/runs/${rerun.id}`}>
          <Time at={rerun.created_at} />
        </Link>
      ))}
    </p>
  )
}
