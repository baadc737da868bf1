/** Lists all workflows, with an area where a saved one can be dropped. */

import { useEffect, useMemo, useState } from "react"
import { useLocation } from "wouter"
import { useQuery } from "@/api"
import type { AdminEffects, WorkflowAnswer, Workflows } from "@/api/schema"
import { putConsoleCounts } from "@/app/consoleCounts"
import { count, Empty, ErrorNote, Field, Page, Time, tokens } from "@/ui"
import { type Column, Table } from "@/ui/Table"
import { words } from "@/words/en/workflows"
import { Drop, type Opened } from "./Drop"
import { Editor, Unfinished } from "./Editor"
import { WorkflowState } from "./WorkflowState"
import "./workflows.css"

export default function WorkflowsPage() {
  const [opened, setOpened] = useState<Opened | null>(null)
  if (opened) return <Editor opened={opened} base={null} onDiscard={() => setOpened(null)} />
  return <List onOpened={setOpened} />
}

function List({ onOpened }: { onOpened: (opened: Opened) => void }) {
  const [, go] = useLocation()
  const [text, setText] = useState("")
  const query = useQuery<Workflows>("/api/admin/workflows")
  const effects = useQuery<AdminEffects>("/api/admin/effects").data?.effects
  const all = query.data?.workflows
  useEffect(() => putConsoleCounts({ workflows: all?.length }), [all])
  const columns = useMemo(() => {
    const counts = new Map<string, number>()
    for (const effect of effects ?? [])
      counts.set(effect.workflow_slug, (counts.get(effect.workflow_slug) ?? 0) + 1)
    return columnsOf(counts)
  }, [effects])
  const rows = all?.filter((workflow) => workflow.slug.includes(text.trim().toLowerCase()))
  const isNone = all?.length === 0
  return (
    <Page
      title={words.title}
      className="workflows"
      aside={all && <span className="quiet">{words.shown(all.length)}</span>}
      actions={
        !isNone && (
          <Field
            label={words.find}
            hideLabel
            icon="search"
            type="search"
            placeholder={words.find}
            value={text}
            onChange={(event) => setText(event.target.value)}
          />
        )
      }
    >
      <Unfinished of="" onOpened={onOpened} />
      <Drop onOpened={onOpened} />
      {query.error && <ErrorNote error={query.error} onRetry={query.reload} />}
      {(all || !query.error) && (
        <Table
          label={words.title}
          columns={columns}
          rows={rows}
          rowKey={(row) => row.slug}
          onOpen={(row) => go(`/console/workflows/${row.slug}`)}
          empty={<Empty title={isNone ? words.none : words.noneFits}>{isNone && words.noneText}</Empty>}
        />
      )}
    </Page>
  )
}

function columnsOf(effects: ReadonlyMap<string, number>): Column<WorkflowAnswer>[] {
  const { columns } = words
  const right = { align: "right", wideOnly: true } as const
  return [
    { key: "state", title: columns.state, width: "112px", cell: (row) => <WorkflowState workflow={row} /> },
    {
      key: "name",
      title: columns.name,
      width: "minmax(120px, 2fr)",
      cell: (row) => <strong className="workflows-name">{row.slug}</strong>,
    },
    {
      key: "version",
      title: columns.version,
      width: "80px",
      align: "right",
      cell: (row) => <span className="mono">{row.version}</span>,
    },
    {
      key: "effects",
      title: columns.effects,
      width: "80px",
      ...right,
      cell: (row) => count(effects.get(row.slug) ?? 0),
    },
    {
      key: "fleets",
      title: columns.fleets,
      width: "minmax(120px, 2fr)",
      wideOnly: true,
      cell: (row) =>
        row.fleets.length > 0 ? row.fleets.join(", ") : <span className="faint">{words.noFleet}</span>,
    },
    {
      key: "price",
      title: columns.price,
      width: "128px",
      ...right,
      cell: (row) =>
        row.price_tokens === null ? (
          <span className="faint">{words.notOffered}</span>
        ) : (
          tokens(row.price_tokens)
        ),
    },
    {
      key: "age",
      title: columns.age,
      width: "120px",
      ...right,
      cell: (row) => (
        <span className="faint">
          <Time at={row.created_at} />
        </span>
      ),
    },
  ]
}
