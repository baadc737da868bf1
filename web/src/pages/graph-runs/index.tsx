/** Lists the user's graph runs, optionally limited to one graph. */

import { useState } from "react"
import { Link } from "wouter"
import { usePages, useQuery } from "@/api"
import type { GraphAnswer, GraphRunSummaries, GraphRunSummary } from "@/api/schema"
import { Button, Choices, Empty, LinkButton, Loaded, Page, Panel, Skeleton, Status, Time, tokens } from "@/ui"
import { words } from "@/words/en/canvas"
import { words as reportWords } from "@/words/en/runReports"
import { useLiveRuns } from "./live"
import "./graph-runs.css"

type Filter = keyof typeof words.filters
const FILTERS = (Object.keys(words.filters) as Filter[]).map((value) => ({
  value,
  label: words.filters[value],
}))
export default function GraphRuns({ graph }: { graph?: string }) {
  const [filter, setFilter] = useState<Filter>("all")
  const about = useQuery<GraphAnswer>(graph ? `/api/graphs/${encodeURIComponent(graph)}` : null, {
    freshSeconds: 60,
  })
  const query = { limit: 50, graph_id: graph, status: filter === "all" ? undefined : filter }
  const pages = usePages<GraphRunSummary, GraphRunSummaries>("/api/graph-runs", query, (page) => page.runs)
  const title = about.data ? words.runsOf(about.data.name) : words.runsTitle
  useLiveRuns(pages.first.data ? pages.first.key : null, { graph, status: query.status })
  return (
    <Page
      title={title}
      actions={
        <>
          <LinkButton href={`/graph-runs/compare${graph ? `?graph=${graph}` : ""}`}>
            {reportWords.compareTwo}
          </LinkButton>
          <LinkButton href={graph ? `/graphs/${graph}` : "/graphs"}>
            {graph ? words.edit : words.title}
          </LinkButton>
        </>
      }
    >
      <div className="graph-runs">
        <Choices label={words.filter} hideLabel options={FILTERS} value={filter} onChange={setFilter} />
        <Loaded query={pages.first} skeleton={<Skeleton height="240px" />}>
          {() =>
            pages.rows?.length === 0 && filter === "all" ? (
              <Empty
                title={words.runsNone}
                act={
                  <LinkButton kind="go" href={graph ? `/graphs/${graph}` : "/graphs"}>
                    {words.toGraphs}
                  </LinkButton>
                }
              >
                {words.runsNoneText}
              </Empty>
            ) : (
              <Panel>
                <ul>
                  {pages.rows?.map((run) => (
                    <li key={run.id}>
                      <RunRow run={run} />
                    </li>
                  ))}
                  {pages.rows?.length === 0 && <li className="graph-runs-none faint">{words.noneOfThese}</li>}
                </ul>
              </Panel>
            )
          }
        </Loaded>
        {pages.hasMore && (
          <Button busy={pages.more.isRunning} onClick={() => void pages.more.run()}>
            {words.older}
          </Button>
        )}
      </div>
    </Page>
  )
}

export function RunRow({ run }: { run: GraphRunSummary }) {
  return (
    <Link href={`/graphs/${run.graph_id}/runs/${run.id}`} className="graph-runs-row">
      <Status status={run.status === "waiting_for_user" ? "waiting" : run.status}>
        {words.statuses[run.status]}
      </Status>
      <strong className="cut-text">{words.graphNamed(run.name, run.graph_version)}</strong>
      <span className="graph-runs-told cut-text faint">{run.error ?? tokens(run.tokens)}</span>
      <Time at={run.ended_at ?? run.created_at} />
    </Link>
  )
}
