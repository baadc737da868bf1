/** Compares two runs, and shows either everything or only the differences. */

import { useEffect } from "react"
import { Link, useLocation, useSearch } from "wouter"
import { useQuery } from "@/api"
import type {
  ComparedRun,
  ComparedValue,
  GraphRunSummaries,
  GraphRunSummary,
  RunComparison,
} from "@/api/schema"
import { Button, Choices, Empty, Loaded, type Option, Page, Panel, Select, Skeleton } from "@/ui"
import { ListTable } from "@/ui/ListTable"
import { words as canvasWords } from "@/words/en/canvas"
import { words } from "@/words/en/runReports"
import { pairOf, type Show, sectionsOf } from "./pair"
import "./graph-compare.css"

const SHOWS = (Object.keys(words.shows) as Show[]).map((value) => ({ value, label: words.shows[value] }))
const RUNS_LISTED_MAX = 100
// A short format, so that the text fits into the list of runs on a phone.
const moment = new Intl.DateTimeFormat(undefined, { dateStyle: "short", timeStyle: "medium" })

/** The address /graph-runs/compare?a=…&b=… selects two runs. With ?graph=…, the page compares that
 * graph's latest two runs. */
export default function GraphCompare() {
  const search = useSearch()
  const [, navigate] = useLocation()
  const pair = pairOf(search)
  const { a, b, graph, show } = pair
  const listed = useQuery<GraphRunSummaries>("/api/graph-runs", {
    query: { limit: RUNS_LISTED_MAX, graph_id: graph || undefined },
    freshSeconds: 10,
  })
  const runs = listed.data?.runs ?? []
  const [newest, older] = runs
  const go = (next: Partial<typeof pair>) => {
    const params = Object.entries({ ...pair, ...next }).filter(([, value]) => value !== "")
    navigate(`/graph-runs/compare?${new URLSearchParams(params)}`, { replace: true })
  }
  // If no runs are selected, compares the graph's latest run with the one before it.
  // biome-ignore lint/correctness/useExhaustiveDependencies: runs only once, after the runs have loaded
  useEffect(() => {
    if (graph && !a && !b && newest && older) go({ a: older.id, b: newest.id })
  }, [graph, newest?.id, older?.id])
  const path = a && b ? "/api/graph-runs/compare" : null
  const comparison = useQuery<RunComparison>(path, { query: { a, b, all: show === "all" || undefined } })
  return (
    <Page title={words.compareTitle} className="graph-compare">
      <div className="graph-compare-pick">
        <Pick
          label={words.first}
          value={a}
          runs={runs}
          olderRun={comparison.data?.a}
          onPick={(id) => go({ a: id })}
        />
        <Button
          className="graph-compare-swap"
          offReason={a && b ? undefined : words.pickBoth}
          onClick={() => go({ a: b, b: a })}
        >
          {words.swap}
        </Button>
        <Pick
          label={words.second}
          value={b}
          runs={runs}
          olderRun={comparison.data?.b}
          onPick={(id) => go({ b: id })}
        />
      </div>
      {path === null ? (
        <Empty title={words.pickBoth}>{words.pickText}</Empty>
      ) : (
        <Loaded
          query={comparison}
          skeleton={<Skeleton height="320px" />}
          missing={<Empty title={words.noRun}>{words.noRunText}</Empty>}
        >
          {(answer) => <Comparison comparison={answer} show={show} onShow={(next) => go({ show: next })} />}
        </Loaded>
      )}
    </Page>
  )
}

interface PickProps {
  label: string
  value: string
  runs: readonly GraphRunSummary[]
  /** The selected run, in case it is too old to be in the list. */
  olderRun: ComparedRun | undefined
  onPick: (id: string) => void
}

function Pick({ label, value, runs, olderRun, onPick }: PickProps) {
  const options: Option<string>[] = runs.map(optionOf)
  if (value && !runs.some((run) => run.id === value))
    options.unshift(olderRun?.id === value ? optionOf(olderRun) : { value, label: value })
  if (!value) options.unshift({ value: "", label: words.pick })
  return (
    <div className="graph-compare-run">
      <Select label={label} options={options} value={value} onChange={onPick} />
      {value && (
        <Link href={`/graph-runs/${value}`} className="graph-compare-open">
          {words.openRun}
        </Link>
      )}
    </div>
  )
}

function optionOf(run: GraphRunSummary | ComparedRun): Option<string> {
  const status = canvasWords.statuses[run.status] ?? run.status
  const at = moment.format(new Date(run.created_at))
  return { value: run.id, label: words.runOption(run.name, run.graph_version, status, at) }
}

interface ComparisonProps {
  comparison: RunComparison
  show: Show
  onShow: (show: Show) => void
}

function Comparison({ comparison, show, onShow }: ComparisonProps) {
  return (
    <>
      <div className="graph-compare-told">
        <Choices label={words.show} hideLabel options={SHOWS} value={show} onChange={onShow} />
        <span className="faint" role="status">
          {words.told(comparison.different, comparison.same)}
        </span>
      </div>
      {(comparison.a.is_expired || comparison.b.is_expired) && <p className="faint">{words.expired}</p>}
      {comparison.values.length === 0 && <Empty title={words.nothing}>{words.nothingText}</Empty>}
      {sectionsOf(comparison.values).map(([section, values]) => (
        <Panel key={section} title={words.sections[section] ?? section}>
          <ListTable<ComparedValue>
            label={words.sections[section] ?? section}
            rows={values}
            rowKey={(row) => row.name}
            columns={[
              { key: "name", title: words.name, head: true, cell: (row) => row.name },
              { key: "a", title: words.first, cell: (row) => <Value value={row.a} /> },
              { key: "b", title: words.second, cell: (row) => <Value value={row.b} /> },
              ...(show === "all" ? [{ key: "result", title: words.result, acts: true, cell: Same }] : []),
            ]}
          />
        </Panel>
      ))}
      {comparison.left_out > 0 && <p className="faint">{words.leftOut(comparison.left_out)}</p>}
    </>
  )
}

function Value({ value }: { value: string | null }) {
  if (value === null) return <span className="faint">{words.missing}</span>
  return <span className="graph-compare-value">{value}</span>
}

function Same({ is_same }: ComparedValue) {
  return is_same ? <span className="faint">{words.same}</span> : <b>{words.different}</b>
}
