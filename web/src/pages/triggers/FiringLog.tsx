/** Lists the runs that one trigger has started, and the firings that were refused or missed. */

import { useEffect } from "react"
import { Link } from "wouter"
import { cache, usePages } from "@/api"
import type { FiringAnswer, Firings, PipelinePage, TriggerAnswer } from "@/api/schema"
import { Button, ErrorNote, Loaded, Skeleton, Status, Time } from "@/ui"
import { type ListColumn, ListTable } from "@/ui/ListTable"
import { words } from "@/words/en/triggers"

const PAGE = 5
/** The interval between reads. Firings have no event stream. */
const LOOK_AGAIN_MS = 5_000
const STATES: Record<string, string> = {
  starting: "queued",
  started: "succeeded",
  refused: "failed",
  missed: "skipped",
}

interface FiringLogProps {
  trigger: TriggerAnswer
  pipelines: PipelinePage["pipelines"]
}

export function FiringLog({ trigger, pipelines }: FiringLogProps) {
  const path = `/api/triggers/${trigger.id}/firings`
  const pages = usePages<FiringAnswer, Firings>(path, { limit: PAGE }, (answer) => answer.firings)
  useEffect(() => {
    const timer = setInterval(() => document.hidden || cache.invalidate(path), LOOK_AGAIN_MS)
    return () => clearInterval(timer)
  }, [path])
  const pipeline = pipelines.find((pipeline) => pipeline.id === trigger.pipeline_id)
  const runPath = (run: string) =>
    trigger.graph_id ? `/graph-runs/${run}` : `/pipelines/${pipeline?.id ?? trigger.pipeline_id}/runs/${run}`
  return (
    <>
      <h3>{words.firings}</h3>
      <Loaded query={pages.first} skeleton={<Skeleton height="60px" />}>
        {() =>
          pages.rows && pages.rows.length > 0 ? (
            <ListTable
              label={words.firings}
              columns={columnsOf(runPath)}
              rows={pages.rows}
              rowKey={(firing) => firing.id}
            />
          ) : (
            <p className="faint">
              {words.noFiring}. {words.noFiringText}
            </p>
          )
        }
      </Loaded>
      {pages.more.error && <ErrorNote error={pages.more.error} />}
      {pages.hasMore && (
        <div>
          <Button size="small" busy={pages.more.isRunning} onClick={() => void pages.more.run()}>
            {words.older}
          </Button>
        </div>
      )}
    </>
  )
}

function columnsOf(runPath: (run: string) => string): ListColumn<FiringAnswer>[] {
  const { columns } = words
  return [
    {
      key: "state",
      title: columns.state,
      head: true,
      cell: (firing) => (
        <Status status={STATES[firing.status] ?? firing.status}>{words.states[firing.status]}</Status>
      ),
    },
    { key: "cause", title: columns.cause, cell: (firing) => words.causes[firing.cause] ?? firing.cause },
    {
      key: "time",
      title: columns.time,
      cell: (firing) => <Time at={firing.planned_at ?? firing.created_at} />,
    },
    {
      key: "run",
      title: columns.run,
      cell: (firing) =>
        firing.run_id ? (
          <Link href={runPath(firing.run_id)}>
            {firing.run_status ? (words.runStates[firing.run_status] ?? firing.run_status) : words.openRun}
          </Link>
        ) : (
          words.noRun
        ),
    },
    {
      key: "reason",
      title: columns.reason,
      cell: (firing) => firing.error ?? (firing.missed > 0 ? words.missed(firing.missed) : ""),
    },
  ]
}
