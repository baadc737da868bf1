/** A list of jobs with filters, views and bulk actions. Used by the pages for jobs and for the
 * queue. */

import { type ReactNode, useCallback, useEffect, useMemo, useRef, useState } from "react"
import { useLocation, useSearch } from "wouter"
import { useEvents, useQuery } from "@/api"
import type {
  AdminEffects,
  BulkFilter,
  JobListed,
  OverviewNow,
  Tenants,
  Workers,
  Workflows,
} from "@/api/schema"
import { putConsoleCounts } from "@/app/consoleCounts"
import { chooseDensity, density } from "@/app/theme"
import { Choices, Dialog, Empty, ErrorNote, Page } from "@/ui"
import { words } from "@/words/en/jobs"
import { BulkBar, notifyDone, notifyFailed, type OpenDialog } from "./BulkBar"
import { actOn } from "./bulk"
import { FilterBar } from "./FilterBar"
import { type Chip, chipsOf, filterOf, searchOf } from "./filter"
import { JobTable } from "./JobTable"
import { filterValuesOf } from "./suggest"
import { EVENTS, useJobs } from "./useJobs"
import "./jobs.css"

interface JobListProps {
  title: string
  path: string
  /** The default filter if the address has no status. */
  within?: BulkFilter
  views: (chips: readonly Chip[], show: (search: string) => void, version: number) => ReactNode
  above?: ReactNode
  empty: ReactNode
}

const FRESH = { freshSeconds: 60 }

function useFilterValues() {
  const workflows = useQuery<Workflows>("/api/admin/workflows", { freshSeconds: 10 }).data?.workflows
  const effects = useQuery<AdminEffects>("/api/admin/effects", FRESH).data?.effects
  const workers = useQuery<Workers>("/api/admin/workers", FRESH).data?.workers
  const tenants = useQuery<Tenants>("/api/admin/tenants", FRESH).data?.tenants
  const known = useMemo(
    () => filterValuesOf({ workflows, effects, workers, tenants }),
    [workflows, effects, workers, tenants],
  )
  return { known, workflows: workflows ?? [] }
}

export function JobList({ title, path, within, views, above, empty }: JobListProps) {
  const search = useSearch()
  const [, go] = useLocation()
  const chips = useMemo(() => chipsOf(search), [search])
  const filter = useMemo(() => {
    const own = filterOf(chips, new Date())
    return { ...within, ...own }
  }, [chips, within])
  const [version, setVersion] = useState(0)
  const jobs = useJobs(
    filter,
    useCallback(() => setVersion((old) => old + 1), []),
  )
  const { known, workflows } = useFilterValues()
  const show = (next: string) => go(next ? `${path}?${next}` : path, { replace: true })
  const selection = useSelection(search)
  const { selected } = selection
  const [dialog, setDialog] = useState<OpenDialog>(null)
  const { field, toRows, isHelpOpen, setHelpOpen } = usePageKeys()
  useEvents<OverviewNow>(EVENTS, (data, { event }) => {
    if (event === "counts") putConsoleCounts({ queued: data.queued })
  })

  const retryOne = async (row: JobListed) => {
    notifyDone("retry", await actOn("retry", { ids: [row.id] }))
    jobs.reload()
  }
  const onKey = (key: string, row: JobListed) => {
    if (key === "Escape") selection.set(new Set())
    if (key === "r" && selection.isAll) setDialog("retry")
    else if (key === "r" && selected.size === 0) void retryOne(row).catch(notifyFailed)
    else if (key === "r")
      void actOn("retry", { ids: [...selected] }).then((done) => {
        notifyDone("retry", done)
        finish()
      }, notifyFailed)
    if (key === "p") {
      if (selected.size === 0) selection.set(new Set([row.id]))
      setDialog("priority")
    }
  }
  const finish = () => {
    selection.set(new Set())
    setDialog(null)
    jobs.reload()
    toRows()
  }
  const names = new Set(jobs.rows?.filter((row) => selected.has(row.id)).map((row) => row.workflow))
  return (
    <Page fill className="jobs" title={title} aside={views(chips, show, version)} actions={<Density />}>
      {above}
      <FilterBar
        ref={field}
        chips={chips}
        known={known}
        onChange={(next) => show(searchOf(next))}
        onLeave={toRows}
      />
      {jobs.error && <ErrorNote error={jobs.error} onRetry={jobs.reload} />}
      {jobs.leftOut.length > 0 && <p className="jobs-left-out">{words.leftOut(jobs.leftOut.join(", "))}</p>}
      {(jobs.rows || !jobs.error) && (
        <JobTable
          label={title}
          jobs={jobs}
          tenantNames={known.tenantNames}
          selected={selected}
          onSelect={selection.set}
          onOpen={(row) => go(`/console/jobs/${row.id}`)}
          onKey={onKey}
          empty={chips.length > 0 ? <NoMatch onClear={() => show("")} /> : empty}
        />
      )}
      {selected.size > 0 ? (
        <BulkBar
          chosen={selection.isAll ? { filter } : { ids: [...selected] }}
          count={selection.isAll ? null : selected.size}
          dialog={dialog}
          onDialog={setDialog}
          onDone={finish}
          onSelectAll={
            !selection.isAll && jobs.hasMore && selected.size === jobs.rows?.length ? selection.takeAll : null
          }
          onSelectNone={() => selection.set(new Set())}
          workflows={workflows.filter((workflow) => names.has(workflow.slug))}
        />
      ) : (
        <p className="jobs-keys wide-only">
          {words.keysOf.map(([key, text]) => (
            <span key={key}>
              <kbd>{key}</kbd> {text}
            </span>
          ))}
        </p>
      )}
      <Dialog open={isHelpOpen} onClose={() => setHelpOpen(false)} title={words.keys}>
        <dl className="jobs-help">
          {words.keysOf.map(([key, text]) => (
            <div key={key}>
              <dt>
                <kbd>{key}</kbd>
              </dt>
              <dd>{text}</dd>
            </div>
          ))}
        </dl>
      </Dialog>
    </Page>
  )
}

/** Keeps the selection, either as row ids or as all matching jobs, including those that haven't
 * been read yet. */
function useSelection(of: string) {
  const [selected, setSelected] = useState<ReadonlySet<string>>(new Set())
  const [isAll, setAll] = useState(false)
  const set = useCallback((next: ReadonlySet<string>) => {
    setSelected(next)
    setAll(false)
  }, [])
  // biome-ignore lint/correctness/useExhaustiveDependencies: the selection is cleared when the list changes
  useEffect(() => set(new Set()), [of, set])
  return { selected, set, isAll, takeAll: () => setAll(true) }
}

const ROW_KEYS = new Set(["j", "k", "x", "r", "p", "ArrowDown", "ArrowUp"])

/** Handles keys for the whole page, except in fields, buttons and dialogs. */
function usePageKeys() {
  const field = useRef<HTMLInputElement>(null)
  const [isHelpOpen, setHelpOpen] = useState(false)
  const toRows = useCallback(() => document.querySelector<HTMLElement>(".jobs [role=grid]")?.focus(), [])
  useEffect(() => {
    const handle = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement
      if (event.ctrlKey || event.metaKey || event.altKey || target.closest("dialog, input, textarea, select"))
        return
      if (event.key === "/") {
        event.preventDefault()
        field.current?.focus()
      } else if (event.key === "?") setHelpOpen(true)
      else if (ROW_KEYS.has(event.key) && !target.closest("[role=grid], [role=menu], [role=tablist]")) {
        const grid = document.querySelector<HTMLElement>(".jobs [role=grid]")
        event.preventDefault()
        grid?.focus()
        grid?.dispatchEvent(new KeyboardEvent("keydown", { key: event.key, bubbles: true }))
      }
    }
    document.addEventListener("keydown", handle)
    return () => document.removeEventListener("keydown", handle)
  }, [])
  return { field, toRows, isHelpOpen, setHelpOpen }
}

function Density() {
  const [chosen, setChosen] = useState(density)
  return (
    <div className="wide-only">
      <Choices
        label={words.density}
        hideLabel
        value={chosen}
        options={[
          { value: "compact", label: words.compact },
          { value: "normal", label: words.normal },
        ]}
        onChange={(next) => {
          chooseDensity(next)
          setChosen(next)
        }}
      />
    </div>
  )
}

function NoMatch({ onClear }: { onClear: () => void }) {
  return (
    <Empty
      title={words.noMatch}
      act={
        <button type="button" className="button button-go button-normal" onClick={onClear}>
          {words.noMatchAct}
        </button>
      }
    >
      {words.noMatchText}
    </Empty>
  )
}
