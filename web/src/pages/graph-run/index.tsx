/** The live page of a graph run: node states and results, questions, failures and retries. */

import { useEffect, useMemo, useRef, useState } from "react"
import { useLocation, useSearch } from "wouter"
import { api, cache, useAct, useEvents, useQuery } from "@/api"
import type { GraphRunAnswer, WorkflowOffers } from "@/api/schema"
import { graphRunPath, OFFERS } from "@/app/reads"
import {
  Button,
  Confirm,
  Dialog,
  ErrorNote,
  Field,
  LinkButton,
  Loaded,
  Progress,
  Skeleton,
  Status,
  tokens,
  useTitle,
} from "@/ui"
import { words } from "@/words/en/canvas"
import { words as reportWords } from "@/words/en/runReports"
import { Bar, NotThere } from "../canvas/Bar"
import { documentOf, type GraphDocument, outerOf, own, type Places } from "../canvas/document"
import CanvasFlow from "../canvas/Flow"
import type { Sheet } from "../canvas/history"
import { useInner } from "../canvas/inner"
import { filledPlaces, loadLayout, placesFor, placesOf } from "../canvas/layout"
import { GraphTypes, offersOf } from "../canvas/types"
import "../canvas/canvas.css"
import { ExecutionPanel } from "./Execution"
import {
  backendName,
  isOver,
  nodeRuns,
  type PreviewEvent,
  type Previews,
  picturesToPick,
  type RunEvent,
  SteadyUrls,
  stampOf,
  withEvent,
} from "./follow"
import { Gallery, latestFiles, Strip } from "./Outputs"
import { type Answer, Question, sameAnswer, sendAnswer } from "./Question"
import { EarlierRun, LaterRuns, RunAgain } from "./RunAgain"
import { Timeline } from "./Timeline"

/** The page's address contains the ids of the graph and the run, or only the run's id. The key
 * resets the page when a link leads to another run, which may use a different graph version. */
export default function GraphRunPage({ id }: { id: string }) {
  return <GraphRun key={id} id={id} />
}

function GraphRun({ id }: { id: string }) {
  const path = graphRunPath(id)
  const document = useRef<GraphRunAnswer["document"]>(null)
  const run = useQuery<GraphRunAnswer>(path, {
    // A run's graph never changes, so it is read only once.
    read: async (signal) => {
      const answer = await api.get<GraphRunAnswer>(graphRunPath(id, document.current === null), { signal })
      return { ...answer, document: answer.document ?? document.current }
    },
  })
  document.current ??= run.data?.document ?? null
  // Loads the layout code at the same time as the data, because a graph that was never arranged by
  // hand has no positions.
  useEffect(loadLayout, [])
  const offers = useQuery<WorkflowOffers>(OFFERS, { freshSeconds: 30 })
  return (
    <Loaded
      query={run}
      skeleton={<Skeleton height="70vh" />}
      missing={<NotThere title={words.noRun} href="/graph-runs" act={words.toRuns} />}
    >
      {(shown) => (
        <Run
          key={shown.id}
          run={shown}
          offers={offers.data?.workflows ?? []}
          put={(next) => cache.set<GraphRunAnswer>(path, () => next)}
          renew={(next) => {
            // The response to an action contains neither file URLs nor the graph, so the previous
            // ones stay until the next read.
            const updated = { ...next, executions: shown.executions, document: shown.document }
            cache.set<GraphRunAnswer>(path, () => updated)
            run.reload()
          }}
          reload={run.reload}
        />
      )}
    </Loaded>
  )
}

interface RunProps {
  run: GraphRunAnswer
  offers: WorkflowOffers["workflows"]
  /** Stores the state that an event reported. */
  put: (run: GraphRunAnswer) => void
  /** Stores the response to an action. */
  renew: (run: GraphRunAnswer) => void
  reload: () => void
}

const NOBODY: ReadonlySet<string> = new Set()
const NO_PROBLEMS: never[] = []

function Run({ run, offers, put, renew, reload }: RunProps) {
  useTitle(words.runName(run.name))
  const previews = useFollowed(run, put, reload)
  const [selected, select] = useState(NOBODY)
  const [isGallery, setGallery] = useState(false)
  const [isTimeline, setTimeline] = useTimelineView()
  const urls = useRef(new SteadyUrls())
  const { sheet, isWhole } = useSheet(run)
  const offerOf = useMemo(() => offersOf(offers), [offers])
  const innerOf = useInner(sheet.document)
  const types = useMemo(
    () => new GraphTypes(sheet.document, offerOf, innerOf),
    [sheet.document, offerOf, innerOf],
  )
  const runs = useMemo(() => nodeRuns(run, urls.current.of, previews), [run, previews])
  const [only] = selected.size === 1 ? [...selected] : []
  const { progress } = run
  const percent = Math.floor(progress.overall_percent)
  return (
    <div className="canvas canvas-run">
      <h1 className="unseen">{words.runName(run.name)}</h1>
      <Bar
        name={<b className="cut-text">{run.name}</b>}
        status={words.version(run.graph_version)}
        graphId={run.graph_id}
        view="run"
        runId={run.id}
      >
        <div className="canvas-progress">
          <Status status={run.status === "waiting_for_user" ? "waiting" : run.status}>
            {words.statuses[run.status]}
          </Status>
          <Progress
            label={words.progress}
            value={progress.overall_percent / 100}
            state={barState(run.status)}
          />
          <span className="badge" role="status">
            {words.nodesDone(progress.completed_nodes, progress.total_nodes, percent)}
          </span>
        </div>
        <div className="canvas-acts">
          <span className="badge canvas-spent">{words.spent(tokens(run.tokens), isOver(run.status))}</span>
          <Button size="small" aria-pressed={isTimeline} onClick={() => setTimeline(!isTimeline)}>
            {reportWords.timeline}
          </Button>
          <LinkButton size="small" href={`/graph-runs/compare?a=${run.id}`}>
            {reportWords.compare}
          </LinkButton>
          <Button size="small" onClick={() => setGallery(true)}>
            {words.outputs}
          </Button>
          {!isOver(run.status) && <Cancel run={run} renew={renew} />}
        </div>
      </Bar>
      <div className="canvas-body">
        {only && (
          <ExecutionPanel
            key={only}
            id={only}
            executions={run.executions.filter((execution) => outerOf(execution.node) === only)}
            onClose={() => select(NOBODY)}
          >
            {isOver(run.status) && !run.is_expired && <RunAgain run={run} node={only} />}
          </ExecutionPanel>
        )}
        {isTimeline ? (
          <Timeline run={run} selected={only} onSelect={(node) => select(new Set([node]))} />
        ) : (
          <CanvasFlow
            label={words.runName(run.name)}
            sheet={sheet}
            types={types}
            offerOf={offerOf}
            problems={NO_PROBLEMS}
            runs={runs}
            selected={selected}
            onSelect={select}
          />
        )}
        <div className="canvas-news">
          {!isWhole && <p className="canvas-problems">{words.notThere}</p>}
          {run.is_expired && <p className="canvas-problems">{words.expired}</p>}
          <EarlierRun run={run} />
          {isOver(run.status) && <LaterRuns run={run} />}
          {run.status === "failed" && (
            <Failure run={run} renew={renew} onShow={(node) => select(new Set([node]))} />
          )}
          <Strip
            files={latestFiles(run)}
            isOver={isOver(run.status)}
            urlOf={urls.current.of}
            onOpen={() => setGallery(true)}
          />
        </div>
      </div>
      <Questions run={run} renew={renew} pictureOf={(node) => runs.get(node)?.pictures[0] ?? null} />
      <Gallery open={isGallery} onClose={() => setGallery(false)} run={run} urlOf={urls.current.of} />
    </div>
  )
}

/** Keeps the choice in the address (?view=timeline), so that users can link to the timeline. */
function useTimelineView(): [boolean, (isShown: boolean) => void] {
  const isShown = new URLSearchParams(useSearch()).get("view") === "timeline"
  const [path, navigate] = useLocation()
  return [isShown, (next) => navigate(next ? `${path}?view=timeline` : path, { replace: true })]
}

function barState(status: string): "running" | "succeeded" | "failed" | "ink" {
  if (status === "completed") return "succeeded"
  if (status === "failed") return "failed"
  return status === "cancelled" ? "ink" : "running"
}

const RELOAD_MS = 1_000

/** Events update the progress. Results are requested when an execution ends, at most once a
 * second. */
function useFollowed(run: GraphRunAnswer, put: (run: GraphRunAnswer) => void, reload: () => void): Previews {
  const [previews, setPreviews] = useState<Previews>(() => new Map())
  const stamp = useRef(stampOf(run))
  const timer = useRef<ReturnType<typeof setTimeout> | null>(null)
  useEffect(() => () => clearTimeout(timer.current ?? undefined), [])
  const path = `/api/graph-runs/${run.id}/events?previews=true`
  useEvents<RunEvent & PreviewEvent>(isOver(run.status) ? null : path, (data, { event }) => {
    if (event === "preview") {
      setPreviews((before) => new Map(before).set(data.node_id, data.preview))
      return
    }
    const next = withEvent(run, data)
    put(next)
    const now = stampOf(next)
    if (now === stamp.current && event !== "end") return
    stamp.current = now
    if (isOver(next.status)) {
      reload()
      cache.invalidate("/api/wallet")
    } else
      timer.current ??= setTimeout(() => {
        timer.current = null
        reload()
      }, RELOAD_MS)
  })
  return previews
}

/** Returns the graph of the run, with its nodes at the positions that the user has given them. */
function useSheet(run: GraphRunAnswer): { sheet: Sheet; isWhole: boolean } {
  const { graph_id: id, graph_version: version, name } = run
  const names = run.nodes.map((node) => node.id).join(" ")
  // biome-ignore lint/correctness/useExhaustiveDependencies: the nodes of a run never change
  const { document, saved } = useMemo(() => {
    const graph = documentOf(run.document)
    if (graph) return { document: graph, saved: placesOf({ id, version, document: run.document }) }
    const nodes = run.nodes.map(({ id, type, workflow, effect }) =>
      Object.fromEntries(
        Object.entries({ id, type, workflow, effect }).filter(([, value]) => value !== null),
      ),
    )
    const bare: GraphDocument = { name, nodes: [], connections: [] }
    return { document: documentOf({ name, nodes }) ?? bare, saved: {} }
  }, [run.document, id, version, name, names])
  const [laid, setLaid] = useState<Places>({})
  const places = useMemo(() => filledPlaces(saved, laid), [saved, laid])
  const isPlaced = document.nodes.every((node) => own(places, node.id))
  useEffect(() => {
    if (!isPlaced) void placesFor(document).then(setLaid)
  }, [document, isPlaced])
  const sheet = useMemo(() => ({ document, places }), [document, places])
  return { sheet, isWhole: run.document !== null }
}

function Cancel({ run, renew }: Pick<RunProps, "run" | "renew">) {
  const [isDialogOpen, setDialogOpen] = useState(false)
  return (
    <>
      <Button size="small" kind="stop" onClick={() => setDialogOpen(true)}>
        {words.cancel}
      </Button>
      <Confirm
        open={isDialogOpen}
        onClose={() => setDialogOpen(false)}
        title={words.cancelTitle}
        act={words.cancelAct}
        onConfirm={async () => renew(await api.post<GraphRunAnswer>(`/api/graph-runs/${run.id}/cancel`))}
      >
        {words.cancelText}
      </Confirm>
    </>
  )
}

interface FailureProps extends Pick<RunProps, "run" | "renew"> {
  onShow: (node: string) => void
}

function Failure({ run, renew, onShow }: FailureProps) {
  const [isDialogOpen, setDialogOpen] = useState(false)
  const retry = useAct(async (backend: string) => {
    renew(await api.post<GraphRunAnswer>(`/api/graph-runs/${run.id}/retry`, backend ? { backend } : {}))
    setDialogOpen(false)
  })
  const { error } = run
  return (
    <div className="canvas-problems" role="alert">
      <Status status="failed">{words.statuses.failed}</Status>
      <span className="canvas-problem">
        {error?.message} {error?.backend && words.failedOn(backendName(error.backend))}
      </span>
      {error && (
        <Button size="small" kind="ghost" onClick={() => onShow(error.node)}>
          {words.show}
        </Button>
      )}
      <Button size="small" onClick={() => setDialogOpen(true)}>
        {words.retryOn}
      </Button>
      <Button size="small" kind="go" busy={retry.isRunning} onClick={() => void retry.run("")}>
        {words.retry}
      </Button>
      {retry.error && !isDialogOpen && <ErrorNote error={retry.error} />}
      <RetryOn
        open={isDialogOpen}
        alternatives={error?.alternatives ?? []}
        isRunning={retry.isRunning}
        onClose={() => setDialogOpen(false)}
        onRetry={(backend) => void retry.run(backend)}
      >
        {retry.error && <ErrorNote error={retry.error} />}
      </RetryOn>
    </div>
  )
}

interface RetryOnProps {
  open: boolean
  alternatives: readonly string[]
  isRunning: boolean
  onClose: () => void
  onRetry: (backend: string) => void
  children: React.ReactNode
}

function RetryOn({ open, alternatives, isRunning, onClose, onRetry, children }: RetryOnProps) {
  const [backend, setBackend] = useState(alternatives[0] ?? "")
  return (
    <Dialog
      open={open}
      onClose={onClose}
      title={words.retryTitle}
      actions={
        <>
          <Button onClick={onClose}>{words.notNow}</Button>
          <Button kind="go" busy={isRunning} onClick={() => onRetry(backend.trim())}>
            {words.retryAct(backend ? backendName(backend) : words.sameBackend)}
          </Button>
        </>
      }
    >
      <p className="quiet">{words.retryText}</p>
      <Field
        label={words.retryBackend}
        hint={words.retryBackendHint}
        list="canvas-backends"
        value={backend}
        onChange={(event) => setBackend(event.target.value)}
      />
      <datalist id="canvas-backends">
        {alternatives.map((alternative) => (
          <option key={alternative} value={alternative} />
        ))}
      </datalist>
      {children}
    </Dialog>
  )
}

interface QuestionsProps extends Pick<RunProps, "run" | "renew"> {
  pictureOf: (node: string) => string | null
}

/** Shows one question at a time. A postponed question remains available. */
function Questions({ run, renew, pictureOf }: QuestionsProps) {
  const [isLater, setLater] = useState(false)
  const same = useRef<Answer | null>(null)
  const sent = useRef(new Set<string>())
  useEffect(() => {
    if (!same.current) return
    for (const pending of run.questions) {
      const answer = sameAnswer(pending, same.current)
      const key = `${pending.node} ${pending.index.join()}`
      if (!answer || sent.current.has(key)) continue
      sent.current.add(key)
      void sendAnswer(run.id, pending, answer).then(renew, () => sent.current.delete(key))
    }
  }, [run.questions, run.id, renew])
  const question = run.questions[0]
  if (!question) return null
  return (
    <>
      {isLater && (
        <div className="canvas-asks">
          <Status status="waiting" pill>
            {words.asksNow(run.questions.length)}
          </Status>
          <Button size="small" kind="go" onClick={() => setLater(false)}>
            {words.answer}
          </Button>
        </div>
      )}
      <Question
        runId={run.id}
        question={question}
        picture={pictureOf(question.node)}
        pictures={picturesToPick(run, question)}
        open={!isLater}
        onLater={() => setLater(true)}
        onAnswered={(next, isForAll, answer) => {
          if (isForAll) same.current = answer
          renew(next)
        }}
      />
    </>
  )
}
