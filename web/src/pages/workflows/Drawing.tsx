/** Draws a workflow the way ComfyUI's editor does. The lists beside the drawing offer the same
 * functions to keyboard and screen reader users. */

import { type PointerEvent, useEffect, useLayoutEffect, useMemo, useRef, useState } from "react"
import type { Drawing as Drawn, SuggestedProperty } from "@/api/schema"
import { Button } from "@/ui"
import { words } from "@/words/en/workflows"
import {
  type Area,
  type Box,
  cut,
  firstView,
  HEAD,
  type InputRow,
  LINE,
  layOut,
  type Room,
  showing,
  wholeView,
  zoomed,
} from "./layout"

/** The kind of difference between two versions. */
export type Change = "added" | "changed"

interface DrawingProps {
  drawing: Drawn
  properties?: readonly SuggestedProperty[]
  /** The bindings of exposed inputs. */
  exposed?: ReadonlySet<string>
  selected?: string | null
  changes?: ReadonlyMap<string, Change>
  /** The node to bring into view. */
  focus?: string | null
  onNode?: (id: string) => void
  onInput?: (property: SuggestedProperty) => void
  /** True if the wheel zooms without a modifier key, because nothing else can scroll. */
  wheel?: boolean
}

const NONE: readonly SuggestedProperty[] = []
const STEP = 1.4

export function Drawing(props: DrawingProps) {
  const { drawing, properties = NONE, onInput } = props
  const laid = useMemo(() => layOut(drawing, properties), [drawing, properties])
  const { svg, view, zoom, fit, pan } = useView(
    laid.area,
    props.wheel ?? false,
    laid.boxes.find((box) => box.node.id === props.focus) ?? null,
  )
  return (
    <div className="workflows-drawing">
      <svg
        ref={svg}
        role="img"
        aria-label={onInput ? words.drawing : words.drawingPlain}
        viewBox={`${view.x} ${view.y} ${view.width} ${view.height}`}
        {...pan}
      >
        {drawing.groups.map((group, place) => (
          // biome-ignore lint/suspicious/noArrayIndexKey: groups have no ids, and their order doesn't change
          <g key={place} className="workflows-drawing-group">
            <rect x={group.x} y={group.y} width={group.width} height={group.height} rx="6" />
            <text x={group.x + 12} y={group.y + 24}>
              {group.title}
            </text>
          </g>
        ))}
        {laid.wires.map((wire) => (
          <path key={wire.key} className="workflows-drawing-wire" d={wire.path} />
        ))}
        {laid.boxes.map((box) => (
          <Node key={box.node.id} box={box} {...props} />
        ))}
      </svg>
      <div className="workflows-drawing-tools">
        <Button size="small" icon="plus" label={words.zoomIn} onClick={() => zoom(STEP)} />
        <Button size="small" icon="minus" label={words.zoomOut} onClick={() => zoom(1 / STEP)} />
        <Button size="small" icon="expand" label={words.fit} onClick={fit} />
      </div>
    </div>
  )
}

function Node({ box, exposed, selected, changes, onNode, onInput }: DrawingProps & { box: Box }) {
  const { node, width, height } = box
  const change = changes?.get(node.id)
  const look = [
    "workflows-drawing-node",
    node.mode !== "always" && "is-off",
    selected === node.id && "is-chosen",
    change && `is-${change}`,
  ]
  const state = change ? words[change === "added" ? "added" : "valueChanged"] : modeOf(node.mode)
  return (
    // biome-ignore lint/a11y/noStaticElementInteractions: the list beside the drawing offers the same by keyboard
    <g
      className={look.filter(Boolean).join(" ")}
      data-node={node.id}
      transform={`translate(${box.x} ${box.y})`}
      onClick={onNode && (() => onNode(node.id))}
    >
      <title>{`${node.title} (${node.type})`}</title>
      <rect className="workflows-drawing-box" width={width} height={height} rx="6" />
      <path
        className="workflows-drawing-head"
        d={`M0 ${HEAD}V6a6 6 0 0 1 6-6H${width - 6}a6 6 0 0 1 6 6V${HEAD}z`}
      />
      <text className="workflows-drawing-title" x="12" y="20">
        {cut(node.title, Math.floor((width - (state ? 90 : 24)) / 7.2))}
      </text>
      {state && (
        <text className="workflows-drawing-state" x={width - 12} y="20">
          {state}
        </text>
      )}
      {box.inputs.map((slot, place) => (
        // biome-ignore lint/suspicious/noArrayIndexKey: inputs may have the same name
        <g key={place} className="workflows-drawing-slot">
          <circle cx="0" cy={slot.y} r="4" />
          <text x="12" y={slot.y + 4}>
            {cut(slot.name, Math.floor(width / 2 / 6.6))}
          </text>
        </g>
      ))}
      {box.outputs.map((slot, place) => (
        // biome-ignore lint/suspicious/noArrayIndexKey: outputs may have the same name
        <g key={place} className="workflows-drawing-slot is-out">
          <circle cx={width} cy={slot.y} r="4" />
          <text x={width - 12} y={slot.y + 4}>
            {cut(slot.name, Math.floor(width / 2 / 6.6))}
          </text>
        </g>
      ))}
      {box.rows.map((row) => (
        <Row
          key={row.property.binding}
          row={row}
          width={width}
          isExposed={exposed?.has(row.property.binding) ?? false}
          onInput={onInput}
        />
      ))}
      {box.hidden > 0 && (
        <text className="workflows-drawing-value" x={width - 12} y={height - 10}>
          {words.more(box.hidden)}
        </text>
      )}
    </g>
  )
}

function modeOf(mode: string): string {
  return mode === "muted" ? words.muted : mode === "bypassed" ? words.bypassed : ""
}

interface RowProps {
  row: InputRow
  width: number
  isExposed: boolean
  onInput: ((property: SuggestedProperty) => void) | undefined
}

function Row({ row, width, isExposed, onInput }: RowProps) {
  const look = `workflows-drawing-row${isExposed ? " is-exposed" : ""}${onInput ? " is-link" : ""}`
  return (
    // biome-ignore lint/a11y/noStaticElementInteractions: the list beside the drawing offers the same by keyboard
    <g
      className={look}
      data-input={row.property.binding}
      onClick={
        onInput &&
        ((event) => {
          event.stopPropagation()
          onInput(row.property)
        })
      }
    >
      <rect x="6" y={row.y - LINE / 2 + 1} width={width - 12} height={LINE - 2} rx="3" />
      <circle cx="16" cy={row.y} r="3.5" />
      <text x="26" y={row.y + 4}>
        {row.name}
      </text>
      <text className="workflows-drawing-value" x={width - 12} y={row.y + 4}>
        {row.value}
      </text>
    </g>
  )
}

/** Dragging moves the view. The wheel and the buttons zoom. */
function useView(all: Area, wheel: boolean, focus: Box | null) {
  const svg = useRef<SVGSVGElement>(null)
  const [view, setView] = useState(all)
  const from = useRef<{ x: number; y: number; view: Area; isMoved: boolean } | null>(null)
  useLayoutEffect(() => setView(firstView(all, roomOf(svg.current))), [all])
  useLayoutEffect(() => {
    if (focus) setView((before) => showing(before, focus))
  }, [focus])
  const zoom = (factor: number, at?: { x: number; y: number }) =>
    setView((before) =>
      zoomed(before, all, factor, at ?? { x: before.x + before.width / 2, y: before.y + before.height / 2 }),
    )
  useEffect(() => {
    const element = svg.current
    if (!element) return undefined
    const turn = (event: WheelEvent) => {
      if (!wheel && !event.ctrlKey && !event.metaKey) return
      event.preventDefault()
      setView((before) => zoomed(before, all, 0.998 ** event.deltaY, placeOf(element, before, event)))
    }
    element.addEventListener("wheel", turn, { passive: false })
    return () => element.removeEventListener("wheel", turn)
  }, [all, wheel])
  const pan = {
    onPointerDown: (event: PointerEvent<SVGSVGElement>) => {
      if (event.button === 0) from.current = { x: event.clientX, y: event.clientY, view, isMoved: false }
    },
    onPointerMove: (event: PointerEvent<SVGSVGElement>) => {
      const start = from.current
      if (!start || !svg.current) return
      const [dx, dy] = [event.clientX - start.x, event.clientY - start.y]
      if (!start.isMoved && Math.abs(dx) + Math.abs(dy) < 5) return
      // The pointer is captured only now. If it were captured earlier, clicks would reach the
      // drawing instead of the node.
      if (!start.isMoved) svg.current.setPointerCapture(event.pointerId)
      start.isMoved = true
      const unit = unitOf(svg.current, start.view)
      setView({ ...start.view, x: start.view.x - dx * unit, y: start.view.y - dy * unit })
    },
    onPointerUp: () => {
      from.current = null
    },
    onPointerCancel: () => {
      from.current = null
    },
  }
  return { svg, view, zoom, fit: () => setView(wholeView(all, roomOf(svg.current))), pan }
}

function roomOf(svg: SVGSVGElement | null): Room {
  const box = svg?.getBoundingClientRect()
  return { width: Math.max(1, box?.width ?? 800), height: Math.max(1, box?.height ?? 400) }
}

/** Returns the number of drawing units per pixel. */
function unitOf(svg: SVGSVGElement, view: Area): number {
  const { width, height } = svg.getBoundingClientRect()
  return Math.max(view.width / Math.max(1, width), view.height / Math.max(1, height))
}

function placeOf(svg: SVGSVGElement, view: Area, at: { clientX: number; clientY: number }) {
  const box = svg.getBoundingClientRect()
  const unit = unitOf(svg, view)
  return {
    x: view.x + view.width / 2 + (at.clientX - box.left - box.width / 2) * unit,
    y: view.y + view.height / 2 + (at.clientY - box.top - box.height / 2) * unit,
  }
}
