/** Draws the canvas. The page owns the graph. This component shows it and reports changes. */

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
import { bodyOf, type NameReference, namesIn, withConnection, withoutReferences } from "./names"
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

/** Waits until the canvas size and all node positions are known, and then draws everything in one
 * pass. */
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
    document.nodes.every((node) => own(places, node.id)) && (isEditable || document.nodes.length > 0)
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
    const shownChanges = changes.filter(({ type }) => type !== "remove" && type !== "select")
    if (shownChanges.length > 0) setView((before) => applyNodeChanges(shownChanges, before))
    const chosen = changes.filter((item) => item.type === "select")
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
            onInit={(instance) => {
              flow.current = instance
              props.onReady?.(instance)
            }}
            isValidConnection={(wire) => isFitting(...endsOf(wire))}
            onConnect={(wire) => {
              const [from, to] = endsOf(wire)
              const begin = types.wireFrom(from, to)
              if (begin) onChange?.({ ...sheet, document: withConnection(sheet.document, begin, to) }, null)
            }}
            onDelete={({ nodes, edges: wires }) => {
              const ids = new Set(nodes.map((node) => node.id))
              const ends = new Set(wires.map((edge) => edge.id))
              const names = namesIn(sheet.document).filter((reference) => ends.has(nameKey(reference)))
              const rest = remove(withoutReferences(sheet.document, names), ids, ends)
              onChange?.({ ...sheet, document: rest }, null)
              onSelect(new Set([...selected].filter((id) => !ids.has(id))))
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
  for (const change of changes) {
    if (change.type !== "select") continue
    if (change.selected) after.add(change.id)
    else after.delete(change.id)
  }
  return after
}

/** Returns the new positions of moved nodes, or null if none has moved. */
function placesAfter(before: Places, changes: NodeChange<FlowNode>[]): Places | null {
  const after: Record<string, Place> = { ...before }
  let isMoved = false
  for (const change of changes) {
    if (change.type !== "position" || change.dragging || !change.position) continue
    const { x, y } = change.position
    const old = own(before, change.id)
    if (old && Math.abs(old.x - x) < 0.5 && Math.abs(old.y - y) < 0.5) continue
    after[change.id] = { x: Math.round(x), y: Math.round(y) }
    isMoved = true
  }
  return isMoved ? after : null
}

function miniLook({ data }: FlowNode): string {
  if (data.problems.length > 0) return "canvas-mini-failed"
  return data.run ? `canvas-mini-${data.run.status}` : ""
}

/** Returns the data that each node displays. Unchanged nodes keep the same object, so that they
 * aren't rendered again. */
function useFacts(props: CanvasFlowProps): ReadonlyMap<string, NodeFacts> {
  const { sheet, types, offerOf, problems, warnings = NONE, runs, exampleOf } = props
  const { document } = sheet
  const baseFacts = useMemo(() => {
    const wiredPorts = new Map<string, string[]>()
    for (const { to } of [...document.connections, ...namesIn(document)]) {
      const { node, port } = targetOf(to)
      wiredPorts.set(node, [...(wiredPorts.get(node) ?? []), port])
    }
    return document.nodes.map((node): NodeFacts => {
      const offer = offerOf(node)
      return {
        node,
        uses: usesOf(node),
        ports: types.ports(node),
        wired: wiredPorts.get(node.id) ?? [],
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
    const factsById = new Map<string, NodeFacts>()
    for (const nodeFacts of baseFacts) {
      const { id } = nodeFacts.node
      const facts = { ...nodeFacts, run: runs?.get(id) ?? null }
      const old = before.current.get(id)
      factsById.set(id, old && isSameFacts(old, facts) ? old : facts)
    }
    before.current = factsById
    return factsById
  }, [baseFacts, runs])
}

function ofNode(problems: readonly ProblemSeen[], id: string): readonly ProblemSeen[] {
  const own = problems.filter((problem) => outerOf(problem.node) === id)
  return own.length > 0 ? own.map((problem) => ({ ...problem, port: portOf(problem) })) : NONE
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
  const old = new Map(before.map((node) => [node.id, node]))
  return sheet.document.nodes.flatMap((node) => {
    const data = facts.get(node.id)
    const place = own(sheet.places, node.id)
    if (!data || !place) return []
    const shown = old.get(node.id)
    const isSelected = selected.has(node.id)
    const position = shown?.dragging ? shown.position : place
    if (
      shown &&
      shown.data === data &&
      shown.selected === isSelected &&
      shown.position.x === position.x &&
      shown.position.y === position.y
    )
      return [shown]
    const kind = words.kinds[node.type] ?? node.type
    const state = data.run ? (words.nodeStatuses[data.run.status] ?? "") : problemWords(data)
    const ariaLabel = words.nodeLabel(node.id, kind, state)
    const { width, height, handles } = drawnSize(data, isSelected)
    return [
      {
        ...shown,
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

/** Returns the key of a connection that is written as a name in a field. */
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
  const nodeIds = useMemo(() => new Set(document.nodes.map((node) => node.id)), [document.nodes])
  const names = useNames(document, facts)
  const entries = [...(runs ?? [])]
  const done = entries
    .filter(([, run]) => run.done > 0)
    .map(([id]) => id)
    .join(" ")
  const skipped = entries
    .filter(([, run]) => run.status === "skipped")
    .map(([id]) => id)
    .join(" ")
  return useMemo(() => {
    const doneIds = new Set(done.split(" "))
    const skippedIds = new Set(skipped.split(" "))
    const lookOf = (source: string, target: string) => {
      if (skippedIds.has(target)) return "is-skipped"
      return doneIds.has(source) ? "is-passed" : ""
    }
    const edge = (id: string, connection: { from: string; to: string }): Edge[] => {
      const source = sourceOf(connection.from)
      const target = targetOf(connection.to)
      if (!nodeIds.has(source.node) || !nodeIds.has(target.node)) return []
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
          ariaLabel: `${connection.from} → ${connection.to}`,
          selected: picked.has(id),
        },
      ]
    }
    const named = names.flatMap((reference) =>
      edge(nameKey(reference), reference).map((drawn) => ({
        ...drawn,
        className: `is-named ${drawn.className}`,
        deletable: reference.isWhole,
      })),
    )
    return [...document.connections.flatMap((connection) => edge(connection.to, connection)), ...named]
  }, [document.connections, names, nodeIds, done, skipped, problems, picked])
}

/** Returns the references by name whose source and target ports both exist. */
function useNames(document: GraphDocument, facts: ReadonlyMap<string, NodeFacts>): readonly NameReference[] {
  const names = useMemo(() => namesIn(document), [document])
  const previous = useRef<readonly NameReference[]>([])
  return useMemo(() => {
    const has = (side: "inputs" | "outputs", id: string, port: string) =>
      facts.get(id)?.ports[side].some((item) => item.name === port) ?? false
    const drawn = names.filter(({ from, to }) => {
      const source = sourceOf(from)
      const target = targetOf(to)
      return has("outputs", source.node, source.port) && has("inputs", target.node, target.port)
    })
    // Returns the previous list if nothing has changed, so that the connections aren't drawn again.
    if (!isAlike(drawn, previous.current)) previous.current = drawn
    return previous.current
  }, [names, facts])
}
