/** Lists the jobs of all tenants, with filters, saved views, and actions on one or many jobs. */

import { type ReactNode, useEffect, useMemo, useState } from "react"
import { useQuery } from "@/api"
import type { JobCountsAnswer } from "@/api/schema"
import { Badge, Button, Dialog, Empty, Field, LinkButton, Tabs, toast } from "@/ui"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/jobs"
import { type Chip, filterOf, keepViews, searchOf, storedViews, type View } from "./filter"
import { JobList } from "./JobList"

const FAILED_TODAY = "status=failed&since=24h"

export default function JobsPage() {
  return (
    <JobList
      title={words.jobs}
      path="/console/jobs"
      views={(chips, show, version) => <Views chips={chips} show={show} version={version} />}
      empty={
        <Empty
          title={words.none}
          act={
            <LinkButton kind="go" href="/console/workflows">
              {words.noneAct}
            </LinkButton>
          }
        >
          {words.noneText}
        </Empty>
      }
    />
  )
}

interface ViewsProps {
  chips: readonly Chip[]
  show: (search: string) => void
  /** The page reads the counts again whenever this number increases. */
  version: number
}

function Views({ chips, show, version }: ViewsProps) {
  const search = searchOf(chips)
  const [views, setViews] = useState<View[]>(() => storedViews(localStorage))
  const [isNaming, setNaming] = useState(false)
  const day = useMemo(() => filterOf([{ key: "since", value: "24h" }], new Date()), [])
  const all = useQuery<JobCountsAnswer>("/api/admin/jobs/counts", { freshSeconds: 2 })
  const today = useQuery<JobCountsAnswer>("/api/admin/jobs/counts", { query: { ...day }, freshSeconds: 2 })
  // biome-ignore lint/correctness/useExhaustiveDependencies: reads both again when a job has changed
  useEffect(() => {
    if (version === 0) return
    all.reload()
    today.reload()
  }, [version])
  const of = all.data?.counts
  const most = all.data?.counted_max ?? 0
  const sum = of && Object.values(of).reduce((before, count) => before + count, 0)
  const isMore = of && Object.values(of).some((count) => count >= most)
  const tabs = [
    { key: "", title: titleWithCount(words.all, sum, isMore ? sum : undefined) },
    { key: "status=processing", title: titleWithCount(words.running, of?.processing, most) },
    { key: "status=queued", title: titleWithCount(words.queued, of?.queued, most) },
    { key: FAILED_TODAY, title: titleWithCount(words.failedToday, today.data?.counts.failed, most) },
    ...views.map((view) => ({ key: view.search, title: view.name })),
  ]
  const own = views.find((view) => view.search === search)
  const isKnown = tabs.some((tab) => tab.key === search)
  const put = (next: View[]) => {
    keepViews(localStorage, next)
    setViews(next)
  }
  const remove = (view: View) => {
    put(views.filter((other) => other !== view))
    toast({ title: words.removed(view.name), act: { label: words.undo, run: () => put([...views]) } })
  }
  return (
    <>
      <Tabs label={words.views} tabs={tabs} value={search} onChange={show} />
      {!isKnown && (
        <Button kind="ghost" size="small" icon="plus" onClick={() => setNaming(true)}>
          {words.saveView}
        </Button>
      )}
      {own && (
        <Button
          kind="ghost"
          size="small"
          icon="trash"
          label={words.removeView(own.name)}
          onClick={() => remove(own)}
        />
      )}
      <NameView
        open={isNaming}
        onClose={() => setNaming(false)}
        onName={(name) => put([...views, { name, search }])}
      />
    </>
  )
}

function titleWithCount(name: string, count: number | undefined, most: number | undefined): ReactNode {
  return (
    <>
      {name}
      {count !== undefined && (
        <Badge>
          {most !== undefined && count >= most && most > 0 ? words.atLeast(count) : count.toLocaleString()}
        </Badge>
      )}
    </>
  )
}

function NameView({
  open,
  onClose,
  onName,
}: {
  open: boolean
  onClose: () => void
  onName: (name: string) => void
}) {
  const [name, setName] = useState("")
  const save = () => {
    if (!name.trim()) return
    onName(name.trim())
    setName("")
    onClose()
  }
  return (
    <Dialog
      open={open}
      onClose={onClose}
      title={words.saveView}
      actions={
        <>
          <Button onClick={onClose}>{common.cancel}</Button>
          <Button kind="ink" onClick={save}>
            {common.save}
          </Button>
        </>
      }
    >
      <Field
        label={words.viewName}
        hint={words.viewKept}
        autoFocus
        maxLength={40}
        value={name}
        onChange={(event) => setName(event.target.value)}
        onKeyDown={(event) => {
          if (event.key === "Enter") save()
        }}
      />
    </Dialog>
  )
}
