/** Another run from a node on: what comes before it is kept; and the way back to the run that it came from. */

import { Link, useLocation } from "wouter"
import { api, useAct } from "@/api"
import type { GraphRunAnswer } from "@/api/schema"
import { Button, ErrorNote } from "@/ui"
import { words } from "@/words/en/canvas"

export function RunAgain({ run, node }: { run: GraphRunAnswer; node: string }) {
  const [, go] = useLocation()
  const start = useAct(async () => {
    const idempotencyKey = crypto.randomUUID()
    const body = { from: node }
    const made = await api.post<GraphRunAnswer>(`/api/graph-runs/${run.id}/rerun`, body, { idempotencyKey })
    go(`/graphs/${made.graph_id}/runs/${made.id}`)
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
