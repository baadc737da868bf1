/** Lists all effects, published or not. */

import { useEffect, useState } from "react"
import { useLocation } from "wouter"
import { useQuery } from "@/api"
import type { AdminEffectAnswer, AdminEffects } from "@/api/schema"
import { putConsoleCounts } from "@/app/consoleCounts"
import { previewOf } from "@/pages/catalogue/effects"
import { PreviewMedia } from "@/pages/effects/PreviewMedia"
import { MakeEffect } from "@/pages/workflow/MakeEffect"
import { Button, count, duration, Empty, ErrorNote, Field, LinkButton, Page, Time } from "@/ui"
import { type Column, Table } from "@/ui/Table"
import { words } from "@/words/en/effects"
import { EffectState } from "./EffectState"
import "./effects.css"

export default function EffectsPage() {
  const [, go] = useLocation()
  const [isNew, setNew] = useState(false)
  const [text, setText] = useState("")
  const query = useQuery<AdminEffects>("/api/admin/effects")
  const all = query.data?.effects
  useEffect(() => putConsoleCounts({ effects: all?.length }), [all])
  const typed = text.trim().toLocaleLowerCase()
  const rows = all?.filter((effect) =>
    [effect.title, effect.slug, effect.workflow_slug, ...effect.tags]
      .join(" ")
      .toLocaleLowerCase()
      .includes(typed),
  )
  const published = all?.filter((effect) => effect.published).length ?? 0
  return (
    <Page
      title={words.title}
      className="effects"
      aside={all && <span className="quiet">{words.shown(published, all.length)}</span>}
      actions={
        <>
          <Field
            label={words.find}
            hideLabel
            icon="search"
            type="search"
            placeholder={words.find}
            value={text}
            onChange={(event) => setText(event.target.value)}
          />
          <Button kind="ink" icon="plus" onClick={() => setNew(true)}>
            {words.make}
          </Button>
        </>
      }
    >
      {query.error && <ErrorNote error={query.error} onRetry={query.reload} />}
      {(all || !query.error) && (
        <div data-density="roomy">
          <Table
            label={words.title}
            columns={COLUMNS}
            rows={rows}
            rowKey={(row) => row.slug}
            onOpen={(row) => go(`/console/effects/${row.slug}`)}
            empty={<None isNone={all?.length === 0} />}
          />
        </div>
      )}
      {isNew && <MakeEffect workflow={null} onClose={() => setNew(false)} />}
    </Page>
  )
}

function None({ isNone }: { isNone: boolean }) {
  if (!isNone) return <Empty title={words.noneFits} />
  return (
    <Empty
      title={words.none}
      act={
        <LinkButton kind="go" href="/console/workflows">
          {words.dropFirst}
        </LinkButton>
      }
    >
      {words.noneText}
    </Empty>
  )
}

function Thumb({ effect }: { effect: AdminEffectAnswer }) {
  const preview = previewOf(effect)
  return <span className="print effects-thumb">{preview && <PreviewMedia preview={preview} alt="" />}</span>
}

const right = { align: "right", wideOnly: true } as const
const COLUMNS: readonly Column<AdminEffectAnswer>[] = [
  {
    key: "title",
    title: words.columns.title,
    width: "minmax(140px, 3fr)",
    cell: (row) => (
      <span className="effects-name">
        <Thumb effect={row} />
        <span>
          <strong>{row.title}</strong>
          <span className="mono faint">{row.slug}</span>
          {!row.published && <span className="narrow-only faint">{words.unpublished}</span>}
        </span>
      </span>
    ),
  },
  {
    key: "state",
    title: words.columns.state,
    width: "128px",
    wideOnly: true,
    cell: (row) => <EffectState isPublished={row.published} />,
  },
  {
    key: "workflow",
    title: words.columns.workflow,
    width: "minmax(100px, 2fr)",
    wideOnly: true,
    cell: (row) => row.workflow_slug,
  },
  {
    key: "price",
    title: words.columns.price,
    width: "72px",
    align: "right",
    cell: (row) => count(row.price_tokens),
  },
  {
    key: "typical",
    title: words.columns.typical,
    width: "112px",
    ...right,
    cell: (row) => (row.typical_seconds === null ? "" : duration(row.typical_seconds)),
  },
  {
    key: "examples",
    title: words.columns.examples,
    width: "88px",
    ...right,
    cell: (row) => row.examples.length || "",
  },
  {
    key: "locked",
    title: words.columns.locked,
    width: "80px",
    ...right,
    cell: (row) => row.locked.length || "",
  },
  {
    key: "age",
    title: words.columns.age,
    width: "112px",
    ...right,
    cell: (row) => (
      <span className="faint">
        <Time at={row.created_at} />
      </span>
    ),
  },
]
