/** The canvas page: draws a graph, checks it while it is edited, saves its versions and runs it. */

import { useCallback, useEffect, useMemo, useRef, useState } from "react"
import { useLocation } from "wouter"
import { useQuery, useSession } from "@/api"
import type {
  GraphAnswer,
  PublicEffects,
  WorkerSeen,
  Workers,
  WorkflowOffer,
  WorkflowOffers,
} from "@/api/schema"
import { graphPath, OFFERS } from "@/app/reads"
import { Button, Dialog, Empty, ErrorNote, Loaded, Skeleton, toast, tokens, useTitle } from "@/ui"
import { words } from "@/words/en/canvas"
import { Bar, NotThere } from "./Bar"
import { type Clip, clipOf, paste } from "./copy"
import { addNode, outerOf, type Place, remove } from "./document"
import type { Saved } from "./drafts"
import CanvasFlow, { type Flow } from "./Flow"
import { portOf } from "./facts"
import { useInner } from "./inner"
import { Library, newNode } from "./Library"
import { NodePanel } from "./NodePanel"
import { Problems } from "./Problems"
import { RunDialog } from "./RunDialog"
import { GraphTypes, offersOf } from "./types"
import { type Editor, NEW, savedOf, useEditor } from "./useEditor"
import { useKeys } from "./useKeys"
import { Versions } from "./Versions"
import { Yaml } from "./Yaml"
import "./canvas.css"

export default function CanvasPage({ id }: { id: string }) {
  const graph = useQuery<GraphAnswer>(id === NEW ? null : graphPath(id))
  const offers = useQuery<WorkflowOffers>(OFFERS, { freshSeconds: 30 })
  const skeleton = <Skeleton height="70vh" />
  return (
    <Loaded query={offers} skeleton={skeleton}>
      {({ workflows }) =>
        id === NEW ? (
          <Canvas key={id} id={id} stored={null} offers={workflows} />
        ) : (
          <Loaded
            query={graph}
            skeleton={skeleton}
            missing={<NotThere title={words.noGraph} href="/graphs" act={words.toGraphs} />}
          >
            {(graph) => <Canvas key={id} id={id} stored={savedOf(graph)} offers={workflows} />}
          </Loaded>
        )
      }
    </Loaded>
  )
}

/** A graph gets a new address when it is first saved. This flag carries the request to run it
 * over to the new page. */
let isRunRequested = false

interface CanvasProps {
  id: string
  stored: Saved | null
  offers: readonly WorkflowOffer[]
}

const NOBODY: ReadonlySet<string> = new Set()

function Canvas({ id, stored, offers }: CanvasProps) {
  const editor = useEditor(id, stored)
  const { sheet, saved, verdict } = editor
  const { document, places } = sheet
  useTitle(document.name)
  const [, go] = useLocation()
  const [selected, select] = useState<ReadonlySet<string>>(NOBODY)
  const [isYaml, setYaml] = useState(false)
  const [shown, show] = useState<"versions" | "keys" | "run" | null>(() => (takeRunRequest() ? "run" : null))
  const flow = useRef<Flow | null>(null)
  const search = useRef<HTMLInputElement>(null)
  const offerOf = useMemo(() => offersOf(offers), [offers])
  const innerOf = useInner(document)
  const types = useMemo(() => new GraphTypes(document, offerOf, innerOf), [document, offerOf, innerOf])
  const effects = useEffects()
  const backends = useBackends()
  const problems = useMemo(() => verdict?.problems ?? [], [verdict])
  const [only] = selected.size === 1 ? [...selected] : []
  const node = document.nodes.find((node) => node.id === only)
  const add = (what: string, at?: Place) => {
    const newOne = newNode(document, what)
    const place = at ?? freePlace(flow.current, Object.values(places))
    editor.change({ document: addNode(document, newOne), places: { ...places, [newOne.id]: rounded(place) } })
  }
  const copy = useClip(editor, selected, select)
  const erase = () => {
    editor.draw(remove(document, selected))
    select(NOBODY)
  }
  const save = async () => {
    const graph = await editor.save()
    if (!graph) return undefined
    toast({ title: graph.id === id || id === NEW ? words.savedAs(graph.version) : words.savedCopy })
    return graph
  }
  const saveHere = async () => {
    const graph = await save()
    if (graph && graph.id !== id) go(`/graphs/${graph.id}`, { replace: true })
  }
  const run = async () => {
    const graph = editor.isChanged || !saved ? await save() : saved
    if (!graph) return
    if (graph.id === id) return show("run")
    isRunRequested = true
    go(`/graphs/${graph.id}`, { replace: true })
  }
  const tidy = async () => {
    await editor.tidy((nodeId) => {
      const measured = flow.current?.getNode(nodeId)?.measured
      return measured?.width && measured.height
        ? { width: measured.width, height: measured.height }
        : undefined
    })
    requestAnimationFrame(() => void flow.current?.fitView({ padding: 0.15, maxZoom: 1 }))
  }
  const look = useCallback((at: string) => {
    select(new Set([at]))
    void flow.current?.fitView({ nodes: [{ id: at }], maxZoom: 1, duration: 200 })
  }, [])
  useKeys({
    "mod+z": editor.undo,
    "mod+shift+z": editor.redo,
    "mod+y": editor.redo,
    "mod+s": () => void saveHere(),
    "mod+c": copy.copy,
    "mod+v": copy.paste,
    "mod+d": copy.duplicate,
    a: () => {
      select(NOBODY)
      requestAnimationFrame(() => search.current?.focus())
    },
    l: () => void tidy(),
    f: () => void flow.current?.fitView({ padding: 0.15, maxZoom: 1, duration: 200 }),
    y: () => setYaml((before) => !before),
    p: () => problems[0] && look(outerOf(problems.find((problem) => problem.node)?.node ?? "")),
    escape: () => select(NOBODY),
  })
  useLeaveWarning(editor.isChanged)
  const offReason = offReasonOf(document.nodes.length, problems.length)
  return (
    <div className="canvas">
      <h1 className="unseen">{document.name}</h1>
      <Bar
        name={
          <input
            className="canvas-title"
            aria-label={words.nameOf}
            value={document.name}
            onChange={(event) => editor.draw({ ...document, name: event.target.value }, "name")}
          />
        }
        status={saveStatus(editor)}
        graphId={saved?.id ?? null}
        view="edit"
      >
        <div className="canvas-acts">
          <Button
            kind="ghost"
            size="small"
            icon="undo"
            label={words.undo}
            offReason={!editor.canUndo && words.nothingToUndo}
            onClick={editor.undo}
          />
          <Button
            kind="ghost"
            size="small"
            icon="again"
            label={words.redo}
            offReason={!editor.canRedo && words.nothingToRedo}
            onClick={editor.redo}
          />
          <Button kind="ghost" size="small" onClick={() => void tidy()}>
            {words.tidy} <kbd>L</kbd>
          </Button>
          <Button kind="ghost" size="small" aria-pressed={isYaml} onClick={() => setYaml(!isYaml)}>
            {words.yaml}
          </Button>
          <Button kind="ghost" size="small" onClick={() => show("versions")}>
            {words.versions}
          </Button>
          <Button kind="ghost" size="small" onClick={() => show("keys")}>
            {words.keys}
          </Button>
          <Button size="small" busy={editor.isSaving} offReason={offReason} onClick={() => void saveHere()}>
            {words.save}
          </Button>
          <Button kind="go" size="small" offReason={offReason} onClick={() => void run()}>
            <RunWords editor={editor} isValid={!offReason} />
          </Button>
        </div>
      </Bar>
      <div className={isYaml ? "canvas-body has-yaml" : "canvas-body"}>
        {node ? (
          <NodePanel
            document={document}
            node={node}
            types={types}
            offer={node.type === "workflow" ? offerOf(node) : undefined}
            offers={offers}
            innerOf={innerOf}
            backends={backends}
            problems={problems
              .filter((problem) => outerOf(problem.node) === node.id)
              .map((problem) => ({ ...problem, port: portOf(problem) }))}
            onChange={editor.draw}
            onRename={(renamed, before, after) => {
              const { [before]: place, ...rest } = places
              editor.change({ document: renamed, places: place ? { ...rest, [after]: place } : rest })
              select(new Set([after]))
            }}
            onClose={() => select(NOBODY)}
            onDelete={erase}
            onDuplicate={copy.duplicate}
          />
        ) : (
          <Library
            offers={offers}
            backends={backends}
            titleOf={effects.titleOf}
            onAdd={add}
            searchRef={search}
          />
        )}
        <CanvasFlow
          label={document.name}
          sheet={sheet}
          types={types}
          offerOf={offerOf}
          problems={problems}
          warnings={verdict?.warnings}
          exampleOf={effects.exampleOf}
          selected={selected}
          onSelect={select}
          onChange={editor.change}
          onDropped={add}
          onReady={(instance) => {
            flow.current = instance
          }}
        />
        {document.nodes.length === 0 && (
          <div className="canvas-empty">
            <Empty title={words.emptyCanvas}>
              <span className="canvas-wide">{words.emptyCanvasText}</span>
              <span className="canvas-small">{words.emptyNarrow}</span>
            </Empty>
          </div>
        )}
        <p className="canvas-narrow">{words.tooNarrow}</p>
        <div className="canvas-news">
          {editor.saveError && <ErrorNote error={editor.saveError} onRetry={() => void saveHere()} />}
          {editor.checkError && <ErrorNote error={editor.checkError} />}
          {document.nodes.length > 0 && verdict && <Problems verdict={verdict} onShow={look} />}
        </div>
        {isYaml && (
          <Yaml document={document} isReadOnly={false} onChange={(typed) => editor.draw(typed, "yaml")} />
        )}
      </div>
      <Versions
        open={shown === "versions"}
        onClose={() => show(null)}
        graphId={saved?.id ?? null}
        newest={saved?.version ?? 0}
        document={document}
        onTake={(restored, version) => {
          editor.draw(restored)
          toast({ title: words.taken(version), act: { label: words.undo, run: editor.undo } })
        }}
      />
      <KeysDialog open={shown === "keys"} onClose={() => show(null)} />
      {saved && shown === "run" && (
        <RunDialog
          open
          onClose={() => show(null)}
          graphId={saved.id}
          name={document.name}
          version={saved.version}
          inputs={document.nodes.filter((input) => input.type === "input")}
        />
      )}
    </div>
  )
}

function takeRunRequest(): boolean {
  const was = isRunRequested
  isRunRequested = false
  return was
}

function saveStatus({ saved, isChanged }: Editor): string {
  const state = isChanged ? words.notSaved : words.saved
  return saved ? `${words.version(saved.version)}, ${state}` : words.notSaved
}

function offReasonOf(nodes: number, problems: number): string | false {
  if (nodes === 0) return words.emptyFirst
  return problems > 0 && words.problemsFirst
}

/** The text of the run button, with the price once it is known. */
function RunWords({ editor: { verdict }, isValid }: { editor: Editor; isValid: boolean }) {
  const quote = verdict?.quote
  if (!quote || !isValid) return words.run
  return words.runFor(words.quoteRange(quote.tokens_min, quote.tokens_max, tokens))
}

function rounded({ x, y }: Place): Place {
  return { x: Math.round(x), y: Math.round(y) }
}

const NODE = { width: 232, height: 220, apart: 40 }

/** Returns a free place in the visible part of the canvas, searching in rows from the left. */
function freePlace(flow: Flow | null, places: readonly Place[]): Place {
  const box = globalThis.document.querySelector(".canvas-board")?.getBoundingClientRect()
  if (!flow || !box) return { x: 0, y: 0 }
  const { apart, width, height } = NODE
  const first = flow.screenToFlowPosition({ x: box.left + apart, y: box.top + apart })
  const end = flow.screenToFlowPosition({ x: box.right, y: box.bottom })
  let place = first
  const isTaken = () =>
    places.some((other) => Math.abs(other.x - place.x) < width && Math.abs(other.y - place.y) < height)
  while (isTaken()) {
    place = { x: place.x + width + apart, y: place.y }
    if (place.x + width > end.x) place = { x: first.x, y: place.y + height + apart }
  }
  return place
}

/** The copied nodes. They are kept in this tab, and can be pasted into another graph. */
let clip: Clip | null = null

function useClip(editor: Editor, selected: ReadonlySet<string>, select: (ids: ReadonlySet<string>) => void) {
  const { document, places } = editor.sheet
  const put = (copied: Clip | null) => {
    if (!copied || copied.nodes.length === 0) return
    const pasted = paste(document, places, copied)
    editor.change({ document: pasted.document, places: pasted.places })
    select(new Set(pasted.ids))
  }
  return {
    copy: () => {
      if (selected.size > 0) clip = clipOf(document, places, selected)
    },
    paste: () => put(clip),
    duplicate: () => put(clipOf(document, places, selected)),
  }
}

function useEffects() {
  const effects = useQuery<PublicEffects>("/api/effects", { query: { limit: 100 }, freshSeconds: 60 }).data
  return useMemo(() => {
    const bySlug = new Map(effects?.effects.map((effect) => [effect.slug, effect]))
    return {
      titleOf: (name: string) => bySlug.get(name)?.title ?? name,
      exampleOf: (name: string) => {
        const after = bySlug.get(name)?.examples[0]?.after
        return after?.content_type.startsWith("image/") ? after.url : null
      },
    }
  }, [effects])
}

const NO_BACKENDS: readonly WorkerSeen[] = []

/** Returns the workers if the user is also an operator. Other users can't see workers' names. */
function useBackends(): readonly WorkerSeen[] {
  const isOperator = useSession().data?.kinds.includes("operator") ?? false
  const workers = useQuery<Workers>(isOperator ? "/api/admin/workers" : null, { freshSeconds: 15 })
  return workers.data?.workers ?? NO_BACKENDS
}

/** Makes the browser ask before it discards unsaved changes. */
function useLeaveWarning(isChanged: boolean): void {
  useEffect(() => {
    if (!isChanged) return undefined
    const ask = (event: BeforeUnloadEvent) => event.preventDefault()
    window.addEventListener("beforeunload", ask)
    return () => window.removeEventListener("beforeunload", ask)
  }, [isChanged])
}

function KeysDialog({ open, onClose }: { open: boolean; onClose: () => void }) {
  return (
    <Dialog open={open} onClose={onClose} title={words.keysTitle}>
      <dl className="canvas-keys">
        {words.keyRows.map(([keys, what]) => (
          <div key={keys}>
            <dt>
              <kbd>{keys}</kbd>
            </dt>
            <dd>{what}</dd>
          </div>
        ))}
      </dl>
    </Dialog>
  )
}
