/** Draws the canvas. The page owns the graph; this component shows it and reports changes. */

import {
  applyNodeChanges,
  Background,
  BackgroundVariant,
  type Edge,
  type EdgeChange,
  type Connection as FlowConnection,
  getNodesBounds,
  getViewportForBounds,
  MiniMap,
  type NodeChange,
  Panel,
  ReactFlow,
  type ReactFlowInstance,
  ReactFlowProvider,
  useReactFlow,
  useStore,
} from "@xyflow/react"
import "@xyflow/react/dist/base.css"
import {
  type DragEvent,
  type ReactNode,
  type RefObject,
  useCallback,
  useEffect,
  useLayoutEffect,
  useMemo,
  useRef,
  useState,
} from "react"
import type { ProblemSeen } from "@/api/schema"
import { Button } from "@/ui"
import { words } from "@/words/en/canvas"
import { CanvasNode, FAR_PERCENT, Fitting, type FlowNode, Large } from "./CanvasNode"
import {
  type GraphDocument,
  outerOf,
  own,
  type Place,
  type Places,
  remove,
  sourceOf,
  targetOf,
} from "./document"
import { drawnSize, type NodeFacts, type NodeRun, portOf, usesOf } from "./facts"
import type { Sheet } from "./history"
import { bodyOf, type Named, namesIn, unnamed, wired } from "./names"
import type { GraphTypes, OfferOf } from "./types"

export type Flow = ReactFlowInstance<FlowNode, Edge>

interface CanvasFlowProps {
  sheet: Sheet
  types: GraphTypes
  offerOf: OfferOf
  problems: readonly ProblemSeen[]
  warnings?: readonly ProblemSeen[]
  /** The state of each node in a run. */
  runs?: ReadonlyMap<string, NodeRun> | null
  exampleOf?: (name: string) => string | null
  selected: ReadonlySet<string>
  onSelect: (ids: ReadonlySet<string>) => void
  /** Without this callback, the graph is read-only. */
  onChange?: (sheet: Sheet, tag: string | null) => void
  onDropped?: (what: string, place: Place) => void
  onReady?: (flow: Flow) => void
  label: string
  children?: ReactNode
}

const NODE_TYPES = { canvas: CanvasNode }
export const DRAGGED = "application/x-comfyfleet-node"
const NONE: readonly ProblemSeen[] = []
const MINI = { width: 176, height: 108 }
const FIT = { padding: 0.15, maxZoom: 1 }

const ZOOM = { min: 0.1, max: 2 }
/** A graph with more nodes than this counts as large. */
const NODES_MANY = 60

interface Size {
  readonly width: number
  readonly height: number
}

/** Draws nothing until the board's size and all node positions are known, then everything at
 * once. */
export default function CanvasFlow(props: CanvasFlowProps) {
  const { document, places } = props.sheet
  const board = useRef<HTMLElement>(null)
  const [size, setSize] = useState<Size | null>(null)
  useLayoutEffect(() => {
    const { clientWidth: width = 1, clientHeight: height = 1 } = board.current ?? {}
    setSize({ width: Math.max(1, width), height: Math.max(1, height) })
  }, [])
  const isEditable = props.onChange !== undefined
  const isPlaced =
    document.nodes.every((each) => own(places, each.id)) && (isEditable || document.nodes.length > 0)
  const isDrawn = useRef(false)
  isDrawn.current ||= isPlaced && size !== null
  return (
    <section ref={board} className="canvas-board" aria-label={props.label}>
      {size && isDrawn.current && <Board {...props} size={size} board={board} />}
    </section>
  )
}

interface BoardProps extends CanvasFlowProps {
  size: Size
  board: RefObject<HTMLElement | null>
}

function Board(props: BoardProps) {
  const { sheet, types, selected, onSelect, onChange, onDropped, runs, label, board } = props
  const flow = useRef<Flow | null>(null)
  const isDragging = useRef(false)
  const facts = useFacts(props)
  const [view, setView] = useState<FlowNode[]>(() => nodesOf(sheet, facts, selected, []))
  useEffect(() => setView((before) => nodesOf(sheet, facts, selected, before)), [sheet, facts, selected])
  const [picked, setPicked] = useState<ReadonlySet<string>>(new Set())
  const edges = useEdges(sheet, facts, runs ?? null, props.problems, picked)
  const change = (changes: NodeChange<FlowNode>[]) => {
    const kept = changes.filter(({ type }) => type !== "remove" && type !== "select")
    if (kept.length > 0) setView((before) => applyNodeChanges(kept, before))
    const chosen = changes.filter((each) => each.type === "select")
    if (chosen.length > 0) onSelect(pickedAfter(selected, chosen))
    const places = placesAfter(sheet.places, changes)
    if (places && onChange) onChange({ ...sheet, places }, isDragging.current ? null : "move")
  }
  const isFitting = useCallback((from: string, to: string) => types.wireFrom(from, to) !== null, [types])
  const drop = (event: DragEvent) => {
    const what = event.dataTransfer.getData(DRAGGED)
    if (!what || !flow.current || !onDropped) return
    event.preventDefault()
    onDropped(what, flow.current.screenToFlowPosition({ x: event.clientX, y: event.clientY }))
  }
  const isEditable = onChange !== undefined
  const first = useFirstView(view, props.size)
  return (
    <Fitting.Provider value={isFitting}>
      <Large.Provider value={view.length > NODES_MANY}>
        <ReactFlowProvider initialNodes={view} initialEdges={edges} {...first.provider}>
          <ReactFlow<FlowNode, Edge>
            {...first.flow}
            nodes={view}
            edges={edges}
            nodeTypes={NODE_TYPES}
            onNodesChange={change}
            onEdgesChange={(changes) => setPicked((before) => pickedAfter(before, changes))}
            onInit={(made) => {
              flow.current = made
              props.onReady?.(made)
            }}
            isValidConnection={(wire) => isFitting(...endsOf(wire))}
            onConnect={(wire) => {
              const [from, to] = endsOf(wire)
              const begin = types.wireFrom(from, to)
              if (begin) onChange?.({ ...sheet, document: wired(sheet.document, begin, to) }, null)
            }}
            onDelete={({ nodes, edges: wires }) => {
              const ids = new Set(nodes.map((each) => each.id))
              const ends = new Set(wires.map((each) => each.id))
              const names = namesIn(sheet.document).filter((each) => ends.has(nameKey(each)))
              const rest = remove(unnamed(sheet.document, names), ids, ends)
              onChange?.({ ...sheet, document: rest }, null)
              onSelect(new Set([...selected].filter((each) => !ids.has(each))))
            }}
            onMoveStart={() => board.current?.classList.add("is-moving")}
            onMoveEnd={() => board.current?.classList.remove("is-moving")}
            onNodeDragStart={() => {
              isDragging.current = true
            }}
            onNodeDragStop={() => {
              isDragging.current = false
            }}
            onDragOver={(event) => event.preventDefault()}
            onDrop={drop}
            nodesDraggable={isEditable}
            nodesConnectable={isEditable}
            edgesFocusable={isEditable}
            deleteKeyCode={isEditable ? ["Delete", "Backspace"] : null}
            multiSelectionKeyCode={["Shift", "Meta", "Control"]}
            fitViewOptions={FIT}
            minZoom={ZOOM.min}
            maxZoom={ZOOM.max}
            connectionRadius={28}
            attributionPosition="top-right"
            ariaLabelConfig={{ "minimap.ariaLabel": label }}
          >
            <Background variant={BackgroundVariant.Dots} gap={24} size={1.5} />
            <MiniMap
              className="canvas-mini"
              style={MINI}
              pannable
              zoomable
              nodeClassName={(node) => miniLook(node as FlowNode)}
            />
            <Zoom board={board} />
            {props.children}
          </ReactFlow>
        </ReactFlowProvider>
      </Large.Provider>
    </Fitting.Provider>
  )
}

/** Fits all nodes into the first view. Nodes added to an empty canvas later stay where they were
 * placed. */
function useFirstView(view: FlowNode[], { width, height }: Size) {
  const [first] = useState(() => {
    if (view.length === 0) return { provider: {}, flow: {} }
    const shown = getViewportForBounds(
      getNodesBounds(view),
      width,
      height,
      ZOOM.min,
      FIT.maxZoom,
      FIT.padding,
    )
    const provider = {
      initialWidth: width,
      initialHeight: height,
      initialMinZoom: ZOOM.min,
      initialMaxZoom: FIT.maxZoom,
      initialFitViewOptions: FIT,
      fitView: true,
    }
    return { provider, flow: { defaultViewport: shown, fitView: true } }
  })
  return first
}

function Zoom({ board }: { board: RefObject<HTMLElement | null> }) {
  const flow = useReactFlow()
  const percent = useStore((state) => Math.round(100 * state.transform[2]))
  const isFar = percent < FAR_PERCENT
  useLayoutEffect(() => {
    board.current?.classList.toggle("is-far", isFar)
  }, [board, isFar])
  return (
    <Panel position="bottom-left" className="canvas-zoom">
      <Button
        kind="ghost"
        size="small"
        icon="minus"
        label={words.zoomOut}
        onClick={() => void flow.zoomOut()}
      />
      <span className="mono">{percent}%</span>
      <Button kind="ghost" size="small" icon="plus" label={words.zoomIn} onClick={() => void flow.zoomIn()} />
      <Button
        kind="ghost"
        size="small"
        icon="expand"
        label={words.seeAll}
        onClick={() => void flow.fitView(FIT)}
      />
    </Panel>
  )
}

function endsOf(wire: FlowConnection | Edge): [string, string] {
  return [`${wire.source}.${wire.sourceHandle}`, `${wire.target}.${wire.targetHandle}`]
}

function pickedAfter(
  before: ReadonlySet<string>,
  changes: readonly (NodeChange<FlowNode> | EdgeChange)[],
): Set<string> {
  const after = new Set(before)
  for (const each of changes) {
    if (each.type !== "select") continue
    if (each.selected) after.add(each.id)
    else after.delete(each.id)
  }
  return after
}

/** Returns the new positions of moved nodes, or null if none has moved. */
function placesAfter(before: Places, changes: NodeChange<FlowNode>[]): Places | null {
  const after: Record<string, Place> = { ...before }
  let isMoved = false
  for (const each of changes) {
    if (each.type !== "position" || each.dragging || !each.position) continue
    const { x, y } = each.position
    const old = own(before, each.id)
    if (old && Math.abs(old.x - x) < 0.5 && Math.abs(old.y - y) < 0.5) continue
    after[each.id] = { x: Math.round(x), y: Math.round(y) }
    isMoved = true
  }
  return isMoved ? after : null
}

function miniLook({ data }: FlowNode): string {
  if (data.problems.length > 0) return "canvas-mini-failed"
  return data.run ? `canvas-mini-${data.run.status}` : ""
}

/** Returns what each node shows. Unchanged nodes keep the same object, so that they aren't
 * rendered again. */
function useFacts(props: CanvasFlowProps): ReadonlyMap<string, NodeFacts> {
  const { sheet, types, offerOf, problems, warnings = NONE, runs, exampleOf } = props
  const { document } = sheet
  const still = useMemo(() => {
    const taken = new Map<string, string[]>()
    for (const { to } of [...document.connections, ...namesIn(document)]) {
      const { node, port } = targetOf(to)
      taken.set(node, [...(taken.get(node) ?? []), port])
    }
    return document.nodes.map((node): NodeFacts => {
      const offer = offerOf(node)
      return {
        node,
        uses: usesOf(node),
        ports: types.ports(node),
        wired: taken.get(node.id) ?? [],
        problems: ofNode(problems, node.id),
        warnings: ofNode(warnings, node.id),
        example: exampleOf?.(offer?.name ?? String(bodyOf(node).effect ?? "")) ?? null,
        isOffered: node.type !== "workflow" || offer !== undefined,
        run: null,
      }
    })
  }, [document, types, offerOf, problems, warnings, exampleOf])
  const before = useRef<ReadonlyMap<string, NodeFacts>>(new Map())
  return useMemo(() => {
    const made = new Map<string, NodeFacts>()
    for (const each of still) {
      const { id } = each.node
      const facts = { ...each, run: runs?.get(id) ?? null }
      const old = before.current.get(id)
      made.set(id, old && isSameFacts(old, facts) ? old : facts)
    }
    before.current = made
    return made
  }, [still, runs])
}

function ofNode(problems: readonly ProblemSeen[], id: string): readonly ProblemSeen[] {
  const found = problems.filter((each) => outerOf(each.node) === id)
  return found.length > 0 ? found.map((each) => ({ ...each, port: portOf(each) })) : NONE
}

function isSameFacts(one: NodeFacts, other: NodeFacts): boolean {
  return (
    one.node === other.node &&
    one.example === other.example &&
    one.isOffered === other.isOffered &&
    isAlike(one.ports, other.ports) &&
    isAlike(one.wired, other.wired) &&
    isAlike(one.problems, other.problems) &&
    isAlike(one.run, other.run)
  )
}

function isAlike(one: unknown, other: unknown): boolean {
  return one === other || JSON.stringify(one) === JSON.stringify(other)
}

function nodesOf(
  sheet: Sheet,
  facts: ReadonlyMap<string, NodeFacts>,
  selected: ReadonlySet<string>,
  before: readonly FlowNode[],
): FlowNode[] {
  const old = new Map(before.map((each) => [each.id, each]))
  return sheet.document.nodes.flatMap((node) => {
    const data = facts.get(node.id)
    const place = own(sheet.places, node.id)
    if (!data || !place) return []
    const known = old.get(node.id)
    const isSelected = selected.has(node.id)
    const position = known?.dragging ? known.position : place
    if (
      known &&
      known.data === data &&
      known.selected === isSelected &&
      known.position.x === position.x &&
      known.position.y === position.y
    )
      return [known]
    const kind = words.kinds[node.type] ?? node.type
    const state = data.run ? (words.nodeStatuses[data.run.status] ?? "") : problemWords(data)
    const ariaLabel = words.nodeLabel(node.id, kind, state)
    const { width, height, handles } = drawnSize(data, isSelected)
    return [
      {
        ...known,
        id: node.id,
        type: "canvas" as const,
        data,
        position,
        selected: isSelected,
        ariaLabel,
        initialWidth: width,
        initialHeight: height,
        measured: { width, height },
        handles,
      },
    ]
  })
}

function problemWords({ problems }: NodeFacts): string {
  return problems.length > 0 ? words.problems(problems.length) : ""
}

/** Returns the key of a connection that is written as a name. */
function nameKey({ from, to }: { from: string; to: string }): string {
  return `${from} > ${to}`
}

function useEdges(
  { document }: Sheet,
  facts: ReadonlyMap<string, NodeFacts>,
  runs: ReadonlyMap<string, NodeRun> | null,
  problems: readonly ProblemSeen[],
  picked: ReadonlySet<string>,
): Edge[] {
  const known = useMemo(() => new Set(document.nodes.map((each) => each.id)), [document.nodes])
  const names = useNames(document, facts)
  const told = [...(runs ?? [])]
  const done = told
    .filter(([, run]) => run.done > 0)
    .map(([id]) => id)
    .join(" ")
  const skipped = told
    .filter(([, run]) => run.status === "skipped")
    .map(([id]) => id)
    .join(" ")
  return useMemo(() => {
    const from = new Set(done.split(" "))
    const left = new Set(skipped.split(" "))
    const lookOf = (source: string, target: string) => {
      if (left.has(target)) return "is-skipped"
      return from.has(source) ? "is-passed" : ""
    }
    const edge = (id: string, each: { from: string; to: string }): Edge[] => {
      const source = sourceOf(each.from)
      const target = targetOf(each.to)
      if (!known.has(source.node) || !known.has(target.node)) return []
      const isWrong = problems.some(({ node, port }) => node === target.node && port === target.port)
      return [
        {
          id,
          source: source.node,
          sourceHandle: source.port,
          target: target.node,
          targetHandle: target.port,
          label: source.path.join(".") || undefined,
          className: isWrong ? "is-wrong" : lookOf(source.node, target.node),
          ariaLabel: `${each.from} → ${each.to}`,
          selected: picked.has(id),
        },
      ]
    }
    const named = names.flatMap((each) =>
      edge(nameKey(each), each).map((made) => ({
        ...made,
        className: `is-named ${made.className}`,
        deletable: each.isWhole,
      })),
    )
    return [...document.connections.flatMap((each) => edge(each.to, each)), ...named]
  }, [document.connections, names, known, done, skipped, problems, picked])
}

/** Returns the values that are read by name, if both nodes have matching ports. */
function useNames(document: GraphDocument, facts: ReadonlyMap<string, NodeFacts>): readonly Named[] {
  const found = useMemo(() => namesIn(document), [document])
  const kept = useRef<readonly Named[]>([])
  return useMemo(() => {
    const has = (side: "inputs" | "outputs", id: string, port: string) =>
      facts.get(id)?.ports[side].some((each) => each.name === port) ?? false
    const drawn = found.filter(({ from, to }) => {
      const source = sourceOf(from)
      const target = targetOf(to)
      return has("outputs", source.node, source.port) && has("inputs", target.node, target.port)
    })
    // Returns the previous list if nothing has changed, so that the connections aren't drawn again.
    if (!isAlike(drawn, kept.current)) kept.current = drawn
    return kept.current
  }, [found, facts])
}
