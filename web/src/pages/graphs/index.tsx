/** Lists the tenant's graphs and the user's latest runs. */

import { useState } from "react"
import { Link } from "wouter"
import { api, cache, usePages, useQuery, useSession } from "@/api"
import type { GraphPage, GraphRunSummaries, GraphSummary } from "@/api/schema"
import { Button, Confirm, Empty, LinkButton, Loaded, Menu, Page, Panel, Skeleton, Time, toast } from "@/ui"
import { words } from "@/words/en/canvas"
import { RunRow } from "../graph-runs"
import { useLiveRuns } from "../graph-runs/live"
import "./graphs.css"

const LATEST = 5

export default function Graphs() {
  const pages = usePages<GraphSummary, GraphPage>("/api/graphs", { limit: 50 }, (page) => page.graphs)
  const isEmpty = pages.rows?.length === 0
  const create = (label: string) => (
    <>
      <LinkButton kind="go" icon="plus" href="/graphs/new" className="wide-only">
        {label}
      </LinkButton>
      <span className="quiet narrow-only">{words.drawWider}</span>
    </>
  )
  return (
    <Page
      title={words.title}
      actions={
        <>
          <LinkButton href="/graph-runs">{words.allRuns}</LinkButton>
          {!isEmpty && create(words.newGraph)}
        </>
      }
    >
      <Loaded query={pages.first} skeleton={<Skeleton height="240px" />}>
        {() =>
          isEmpty ? (
            <Empty title={words.none} act={create(words.drawOne)}>
              {words.noneText}
            </Empty>
          ) : (
            <div className="graphs">
              <Panel>
                <ul>
                  {pages.rows?.map((graph) => (
                    <li key={graph.id}>
                      <Row graph={graph} />
                    </li>
                  ))}
                </ul>
                {pages.hasMore && (
                  <Button busy={pages.more.isRunning} onClick={() => void pages.more.run()}>
                    {words.older}
                  </Button>
                )}
              </Panel>
              <Latest />
            </div>
          )
        }
      </Loaded>
    </Page>
  )
}

function Row({ graph }: { graph: GraphSummary }) {
  const [isDialogOpen, setDialogOpen] = useState(false)
  const mine = useSession().data?.user?.id === graph.user_id
  return (
    <div className="graphs-row">
      <Link href={`/graphs/${graph.id}`} className="graphs-open">
        <strong className="cut-text">{graph.name}</strong>
        <span className="badge">{words.version(graph.version)}</span>
      </Link>
      <span className="faint">
        <Time at={graph.created_at} />
      </span>
      <Menu
        label={words.more(graph.name)}
        size="small"
        items={[
          { key: "runs", label: words.runs, icon: "clock", href: `/graphs/${graph.id}/runs` },
          mine && {
            key: "remove",
            label: words.remove,
            icon: "trash",
            danger: true,
            run: () => setDialogOpen(true),
          },
        ]}
      />
      <Confirm
        open={isDialogOpen}
        onClose={() => setDialogOpen(false)}
        title={words.removeTitle(graph.name)}
        act={words.removeAct}
        onConfirm={async () => {
          await api.delete(`/api/graphs/${graph.id}`)
          cache.invalidate("/api/graphs")
          toast({ title: words.removed(graph.name) })
        }}
      >
        {words.removeText}
      </Confirm>
    </div>
  )
}

function Latest() {
  const runs = useQuery<GraphRunSummaries>("/api/graph-runs", { query: { limit: LATEST } })
  useLiveRuns(runs.data ? runs.key : null)
  return (
    <Panel title={words.lastRuns}>
      <Loaded query={runs}>
        {(page) => (
          <ul>
            {page.runs.slice(0, LATEST).map((run) => (
              <li key={run.id}>
                <RunRow run={run} />
              </li>
            ))}
            {page.runs.length === 0 && <li className="graphs-none faint">{words.runsNone}</li>}
          </ul>
        )}
      </Loaded>
    </Panel>
  )
}
