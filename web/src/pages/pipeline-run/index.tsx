/** The page of a pipeline run, which shows its candidates as a sheet, as a tree and in pairs, and
 * its failures. */

import { useCallback, useRef, useState } from "react"
import { Link, useLocation, useSearch } from "wouter"
import { api, cache, useAct } from "@/api"
import type { PipelineRunAnswer } from "@/api/schema"
import {
  Badge,
  Button,
  Confirm,
  duration,
  Empty,
  ErrorNote,
  LinkButton,
  Loaded,
  Menu,
  Page,
  Skeleton,
  Status,
  toast,
  tokens,
} from "@/ui"
import { words } from "@/words/en/pipelines"
import { SHOWS, type Show } from "./candidates"
import { Export } from "./Export"
import { Failed } from "./Failed"
import { Grid } from "./Grid"
import { Limits } from "./Limits"
import { Side } from "./Side"
import { reasonOf } from "./state"
import { Tree } from "./Tree"
import { type Book, useBook } from "./useRun"
import { Vote } from "./Vote"
import "./pipeline-run.css"

const VIEWS = ["vote", "grid", "tree", "failed"] as const
type View = (typeof VIEWS)[number]

interface Place {
  view: View
  show: Show
  candidate: string | null
}

export default function PipelineRun({ id }: { slug: string; id: string }) {
  const book = useBook(id)
  const { run } = book
  if (run.error && [404, 422].includes(run.error.status) && !run.data)
    return (
      <Page title={words.run.missing}>
        <Empty
          title={words.run.missing}
          act={
            <LinkButton kind="go" href="/pipelines">
              {words.title}
            </LinkButton>
          }
        >
          {words.run.missingText}
        </Empty>
      </Page>
    )
  if (!run.data)
    return (
      <Page title={words.title} className="pipeline-run">
        <Loaded query={run} skeleton={<Skeleton height="60vh" />}>
          {() => null}
        </Loaded>
      </Page>
    )
  return <Shown book={book} run={run.data} />
}

function usePlace(): [Place, (change: Partial<Place>) => void, (change: Partial<Place>) => string] {
  const [here, go] = useLocation()
  const params = new URLSearchParams(useSearch())
  const place: Place = {
    view: VIEWS.find((view) => view === params.get("view")) ?? "grid",
    show: SHOWS.find((show) => show === params.get("show")) ?? "all",
    candidate: params.get("candidate"),
  }
  const address = (change: Partial<Place>) => {
    const { view, show, candidate } = { ...place, ...change }
    const query = new URLSearchParams({ view })
    if (show !== "all" && view === "grid") query.set("show", show)
    if (candidate && (view === "grid" || view === "tree")) query.set("candidate", candidate)
    return `${here}?${query}`
  }
  // Opening a candidate adds a history entry, so that Back returns from it.
  const opens = (change: Partial<Place>) => Boolean(change.candidate && !place.candidate)
  return [place, (change) => go(address(change), { replace: !opens(change) }), address]
}

function Shown({ book, run }: { book: Book; run: PipelineRunAnswer }) {
  const [place, setPlace, address] = usePlace()
  const [isExporting, setExporting] = useState(false)
  const { view, show } = place
  const candidate = place.candidate ? book.byId.get(place.candidate) : undefined
  const choose = (id: string) => setPlace({ candidate: id === place.candidate ? null : id })
  const close = useClose(setPlace)
  const waiting = run.steps.reduce((sum, step) => sum + step.waiting, 0)
  const hasSide = candidate !== undefined && (view === "grid" || view === "tree")
  return (
    <Page
      title={words.run.title(run.pipeline)}
      className={`pipeline-run pipeline-run-at-${view}`}
      fill={view === "vote"}
      head={run.pipeline}
      aside={<Facts run={run} waiting={waiting} />}
      actions={
        <>
          <nav className="pipeline-run-views" aria-label={words.run.views}>
            {VIEWS.map((item) => (
              <Link
                key={item}
                href={address({ view: item })}
                aria-current={item === view ? "page" : undefined}
              >
                {words.run.view[item]}
                {item === "failed" && failedOf(run) > 0 && <Badge>{failedOf(run)}</Badge>}
              </Link>
            ))}
          </nav>
          <Acts run={run} book={book} onExport={() => setExporting(true)} />
          {waiting > 0 && view !== "failed" && show !== "judge" && (
            <LinkButton kind="go" href={address({ view: "grid", show: "judge" })}>
              {words.run.judge(waiting)}
            </LinkButton>
          )}
        </>
      }
    >
      <Troubles run={run} book={book} />
      <div className={hasSide ? "pipeline-run-parts has-side" : "pipeline-run-parts"}>
        <div className="pipeline-run-main">
          {view === "grid" && (
            <Grid
              book={book}
              run={run}
              show={show}
              onShow={(next) => setPlace({ show: next })}
              chosen={place.candidate}
              onChoose={choose}
            />
          )}
          {view === "tree" && <Tree book={book} run={run} chosen={place.candidate} onChoose={choose} />}
          {view === "vote" && <Vote book={book} run={run} best={address({ view: "grid", show: "all" })} />}
          {view === "failed" && <Failed book={book} run={run} />}
        </div>
        {hasSide && <Side candidate={candidate} book={book} run={run} onChoose={choose} onClose={close} />}
      </div>
      <Export book={book} run={run} open={isExporting} onClose={() => setExporting(false)} />
    </Page>
  )
}

function useClose(setPlace: (change: Partial<Place>) => void): () => void {
  const latest = useRef(setPlace)
  latest.current = setPlace
  return useCallback(() => latest.current({ candidate: null }), [])
}

function failedOf(run: PipelineRunAnswer): number {
  return run.steps.reduce((sum, step) => sum + step.failed, 0)
}

function Facts({ run, waiting }: { run: PipelineRunAnswer; waiting: number }) {
  const total = run.steps.reduce((sum, step) => sum + step.made, 0)
  const { state, word } = reasonOf(run)
  return (
    <span className="pipeline-run-told">
      <Status status={state} pill>
        {word}
      </Status>
      <span className="faint">
        {words.run.facts(total, waiting)}, {tokens(run.tokens)} {words.run.stats.tokens}
        {run.seconds_left && state !== "waiting"
          ? `, ${words.run.stats.left(duration(run.seconds_left))}`
          : ""}
      </span>
    </span>
  )
}

function Acts({ run, book, onExport }: { run: PipelineRunAnswer; book: Book; onExport: () => void }) {
  const [dialog, setDialog] = useState<"cancel" | "limits" | null>(null)
  const [, go] = useLocation()
  const act = async (name: "pause" | "resume" | "cancel") => {
    const answer = await api.post<PipelineRunAnswer>(`${book.path}/${name}`)
    cache.set<PipelineRunAnswer>(book.path, () => answer)
  }
  const isPaused = run.status === "paused"
  const turn = useAct(async () => {
    await act(isPaused ? "resume" : "pause")
    toast({ title: isPaused ? words.run.resumed : words.run.paused })
  })
  return (
    <>
      {run.status !== "cancelled" && (
        <Button icon={isPaused ? "play" : "pause"} busy={turn.isRunning} onClick={() => void turn.run()}>
          {isPaused ? words.run.resume : words.run.pause}
        </Button>
      )}
      <Button icon="download" onClick={onExport}>
        {words.run.export}
      </Button>
      <Menu
        label={words.run.more}
        items={[
          {
            key: "pipeline",
            label: words.run.toPipeline,
            icon: "grid",
            run: () => go(`/pipelines/${run.pipeline_id}`),
          },
          run.status !== "cancelled" && {
            key: "limits",
            label: words.run.limits,
            icon: "sliders",
            run: () => setDialog("limits"),
          },
          run.status !== "cancelled" && {
            key: "cancel",
            label: words.run.cancel,
            icon: "stop",
            danger: true,
            run: () => setDialog("cancel"),
          },
        ]}
      />
      {turn.error && <ErrorNote error={turn.error} />}
      <Confirm
        open={dialog === "cancel"}
        onClose={() => setDialog(null)}
        title={words.run.cancelTitle}
        act={words.run.cancel}
        onConfirm={async () => {
          await act("cancel")
          toast({ title: words.run.cancelled })
        }}
      >
        {words.run.cancelText}
      </Confirm>
      <Limits open={dialog === "limits"} onClose={() => setDialog(null)} run={run} book={book} />
    </>
  )
}

/** Shows the problems that keep the run from continuing, and how to resolve them. */
function Troubles({ run, book }: { run: PipelineRunAnswer; book: Book }) {
  const [isOpen, setOpen] = useState(false)
  const isLimit = ["tokens_limit", "candidates_limit", "time_up"].includes(run.reason ?? "")
  const isFull = run.pause_reason === "storage_limit"
  if (run.files_removed_at !== null) return <p className="pipeline-run-note">{words.run.filesRemoved}</p>
  if (!run.trouble && !isLimit && !isFull) return null
  return (
    <div className="pipeline-run-note" role="status">
      <span>{run.trouble ?? (isFull ? words.storageFull : words.reasons[run.reason ?? ""])}</span>
      {run.status !== "cancelled" && (
        <Button size="small" onClick={() => setOpen(true)}>
          {words.run.limits}
        </Button>
      )}
      <Limits open={isOpen} onClose={() => setOpen(false)} run={run} book={book} />
    </div>
  )
}
