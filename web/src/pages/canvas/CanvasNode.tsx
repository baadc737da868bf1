/** Draws one node with its ports, values and problems and, in a run, its status and result. */

import {
  Handle,
  type Node,
  type NodeProps,
  Position,
  type ReactFlowState,
  useConnection,
  useStore,
  useUpdateNodeInternals,
} from "@xyflow/react"
import { createContext, memo, useCallback, useContext, useEffect, useMemo, useRef } from "react"
import { StateIcon, stateOf } from "@/ui"
import { words } from "@/words/en/canvas"
import {
  type Drawn,
  drawnSize,
  footOf,
  hasPicture,
  type NodeFacts,
  PICTURES_SHOWN_MAX,
  shownInputs,
} from "./facts"
import { valueAt } from "./names"
import type { Port } from "./types"

export type FlowNode = Node<NodeFacts, "canvas">

/** Checks whether a connection from one port to another would be accepted. */
export const Fitting = createContext<(from: string, to: string) => boolean>(() => false)

/** True if the graph is so large that only nodes that are big enough to read are drawn in full. */
export const Large = createContext(false)

/** Below this zoom level, in percent, labels are too small to read, so labels and shadows are left
 * out. */
export const FAR_PERCENT = 35
/** The margin around the visible area within which nodes are drawn in full before they scroll
 * into view. */
const AROUND_PIXELS = 300

export const CanvasNode = memo(function CanvasNode(props: NodeProps<FlowNode>) {
  const { data, selected, positionAbsoluteX: x, positionAbsoluteY: y } = props
  const isLarge = useContext(Large)
  const drawn = useMemo(() => drawnSize(data, selected), [data, selected])
  const { width, height } = drawn
  const isNear = useStore(
    useCallback(
      (view: ReactFlowState) => !isLarge || isReadable(view, { x, y, width, height }),
      [isLarge, x, y, width, height],
    ),
  )
  return isNear ? <Whole {...props} /> : <Outline data={data} selected={selected} drawn={drawn} />
})

interface Box {
  x: number
  y: number
  width: number
  height: number
}

function isReadable({ transform: [left, top, zoom], width, height }: ReactFlowState, box: Box): boolean {
  if (100 * zoom < FAR_PERCENT) return false
  const x = box.x * zoom + left
  const y = box.y * zoom + top
  return (
    x < width + AROUND_PIXELS &&
    y < height + AROUND_PIXELS &&
    x + box.width * zoom > -AROUND_PIXELS &&
    y + box.height * zoom > -AROUND_PIXELS
  )
}

function lookOf({ node, run, problems }: NodeFacts, isSelected: boolean): string {
  const look = [
    "canvas-node",
    `canvas-${node.type}`,
    run && `canvas-is-${runState(run)}`,
    problems.length > 0 && "canvas-is-wrong",
    isSelected && "canvas-is-selected",
    run?.status === "skipped" && "canvas-is-skipped",
  ]
  return look.filter(Boolean).join(" ")
}

function runState(run: NonNullable<NodeFacts["run"]>) {
  return stateOf(run.status === "done" ? "succeeded" : run.status)
}

/** A placeholder with the node's full size that shows only what is visible from afar. Connections
 * end where the ports would be. */
function Outline({ data, selected, drawn }: { data: NodeFacts; selected: boolean; drawn: Drawn }) {
  return (
    <div className={`${lookOf(data, selected)} canvas-outline`} style={{ height: drawn.height }}>
      <header />
      {hasPicture(data.node) && <Picture data={data} />}
      {drawn.handles.map(({ id, type, position, x, y }) => (
        <i
          key={`${type} ${id}`}
          className={type}
          data-handleid={id}
          data-handlepos={position}
          // Port positions are measured from the inside of the border, which is 1 pixel wide.
          style={{ left: x - 1, top: y - 1 }}
        />
      ))}
    </div>
  )
}

function Whole({ id, data, selected }: NodeProps<FlowNode>) {
  const { node, ports, run, problems } = data
  const state = run && runState(run)
  const inputs = shownInputs(data, selected)
  const update = useUpdateNodeInternals()
  const names = [...inputs, ...ports.outputs].map((port) => port.name).join(" ")
  const measured = useRef(names)
  useEffect(() => {
    if (measured.current === names) return
    measured.current = names
    update(id)
  }, [id, names, update])
  return (
    <div className={lookOf(data, selected)}>
      <header>
        <b className="cut-text">{id}</b>
        {data.uses && <i className="cut-text">{data.uses}</i>}
        {problems.length > 0 ? <StateIcon state="failed" /> : state && <StateIcon state={state} />}
      </header>
      {hasPicture(node) && <Picture data={data} />}
      <div className="canvas-ports">
        <div>
          {inputs.map((port) => (
            <InPort key={port.name} node={id} port={port} data={data} />
          ))}
          {inputs.length < ports.inputs.length && (
            <span className="canvas-rest">{words.hidden(ports.inputs.length - inputs.length)}</span>
          )}
        </div>
        <div>
          {ports.outputs.map((port) => (
            <OutPort key={port.name} node={id} port={port} isTaken={run?.way === port.name} />
          ))}
        </div>
      </div>
      <Foot data={data} />
    </div>
  )
}

function Picture({ data: { run, example } }: { data: NodeFacts }) {
  const shown = run ? run.pictures.slice(0, PICTURES_SHOWN_MAX) : example ? [example] : []
  return (
    <div className="canvas-picture">
      {shown.map((picture) => (
        <img key={picture} src={picture} alt="" draggable={false} loading="lazy" decoding="async" />
      ))}
      {run && shown.length === 0 && run.progress !== null && (
        <svg className="canvas-made" viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">
          <rect width={100 * run.progress} height="100" />
          <path d={`M${100 * run.progress} 0V100`} />
        </svg>
      )}
    </div>
  )
}

function InPort({ node, port, data }: { node: string; port: Port; data: NodeFacts }) {
  const wrong = data.problems.find((problem) => problem.port === port.name)
  const value = shownValue(data, port)
  const fit = useFit(node, port.name, "target")
  return (
    <span className={`canvas-port${wrong ? " is-wrong" : ""}`} title={wrong?.message ?? port.type.name}>
      <Handle
        type="target"
        position={Position.Left}
        id={port.name}
        className={`canvas-handle${fit}${wrong ? " is-wrong" : ""}`}
      />
      <span className="canvas-port-name">{port.name}</span>
      {value === undefined ? <i>{port.type.name}</i> : <b className="cut-text">{shortly(value)}</b>}
    </span>
  )
}

/** Returns the value to show. A value that is only a name is shown by its connection instead. */
function shownValue({ node, wired }: NodeFacts, { name }: Port): unknown {
  const value = valueAt(node, name)
  const isOnly = name === "over" || (typeof value === "string" && /^\s*\{\{[^{}]*\}\}\s*$/.test(value))
  return value === "" || (isOnly && wired.includes(name)) ? undefined : value
}

function OutPort({ node, port, isTaken }: { node: string; port: Port; isTaken: boolean }) {
  const fit = useFit(node, port.name, "source")
  return (
    <span className={`canvas-port canvas-port-out${isTaken ? " is-taken" : ""}`} title={port.type.name}>
      <i>{port.type.name}</i>
      <span className="canvas-port-name">{port.name}</span>
      <Handle type="source" position={Position.Right} id={port.name} className={`canvas-handle${fit}`} />
    </span>
  )
}

/** Returns the CSS class that marks whether the connection that the user is drawing may end at a
 * port. */
function useFit(node: string, port: string, type: "source" | "target"): string {
  const isFitting = useContext(Fitting)
  const start = useConnection((state) =>
    state.inProgress ? `${state.fromHandle.type} ${state.fromHandle.nodeId}.${state.fromHandle.id}` : null,
  )
  if (start === null) return ""
  const [from = "", other = ""] = start.split(" ")
  if (from === type) return other === `${node}.${port}` ? "" : " is-off"
  const here = `${node}.${port}`
  const fits = type === "target" ? isFitting(other, here) : isFitting(here, other)
  return fits ? " is-fit" : " is-off"
}

function shortly(value: unknown): string {
  const text = typeof value === "string" ? value : JSON.stringify(value)
  return text.length > 24 ? `${text.slice(0, 23)}…` : text
}

function Foot({ data }: { data: NodeFacts }) {
  const { run, problems } = data
  const texts = footOf(data)
  if (!texts) return null
  const [left, right] = texts
  return (
    <footer className={!run && problems.length > 0 ? "is-failed" : run?.error ? "is-failed" : undefined}>
      <span className="cut-text">{left}</span>
      {right && <span className="mono">{right}</span>}
    </footer>
  )
}
