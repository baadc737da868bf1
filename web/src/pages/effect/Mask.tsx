/** Paints a mask over the picture. White areas are changed. */

import { type KeyboardEvent, type PointerEvent, useEffect, useRef, useState } from "react"
import { Button, Choices, Dialog, FieldFrame, Slider } from "@/ui"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/effect"
import { type Chosen, chosenFile } from "./Media"

/** The longest side of the canvas, in pixels. Larger pictures are painted at this size, because
 * the backend scales a mask to its picture. */
const SIDE_MAX = 2048

interface MaskInputProps {
  label: string
  hint: string | null
  error: string | null
  isOptional: boolean
  /** The picture under the mask. */
  picture: string | null
  chosen: Chosen | null
  onChange: (chosen: Chosen | null) => void
}

export function MaskInput({ label, hint, error, isOptional, picture, chosen, onChange }: MaskInputProps) {
  const [isOpen, setOpen] = useState(false)
  const painted = useRef<{ picture: string; strokes: readonly Stroke[] } | null>(null)
  const close = () => setOpen(false)
  return (
    <FieldFrame
      label={label}
      hint={hint ?? words.paintHint}
      error={error}
      aside={isOptional && <span className="field-hint">{words.optional}</span>}
    >
      {(ids) => (
        <div className="row">
          <Button
            aria-describedby={ids["aria-describedby"]}
            icon="edit"
            offReason={!picture && words.paintFirst}
            onClick={() => setOpen(true)}
          >
            {chosen ? words.paintAgain : words.paintAct}
          </Button>
          {chosen && (
            <>
              <div className="print effect-mask-thumb">{chosen.url && <img src={chosen.url} alt="" />}</div>
              <span className="faint">{words.painted}</span>
              <Button
                kind="ghost"
                size="small"
                icon="cross"
                label={words.remove(label)}
                onClick={() => onChange(null)}
              />
            </>
          )}
          <Dialog open={isOpen} onClose={close} title={words.paint} wide backCloses>
            {picture && (
              <Painter
                picture={picture}
                strokes={chosen && painted.current?.picture === picture ? painted.current.strokes : []}
                onCancel={close}
                onDone={(file, strokes) => {
                  painted.current = { picture, strokes }
                  onChange(chosenFile(file, null))
                  close()
                }}
              />
            )}
          </Dialog>
        </div>
      )}
    </FieldFrame>
  )
}

interface Spot {
  x: number
  y: number
}

interface Size {
  width: number
  height: number
}

/** One stroke of the brush. Sizes are fractions of the picture. */
interface Stroke {
  tool: "draw" | "erase"
  brush: number
  spots: Spot[]
}

function drawStroke(paper: CanvasRenderingContext2D, { tool, brush, spots }: Stroke, from = 0): void {
  const { width, height } = paper.canvas
  const [first, ...rest] = spots.slice(from)
  if (!first) return
  paper.globalCompositeOperation = tool === "draw" ? "source-over" : "destination-out"
  paper.strokeStyle = "#fff"
  paper.lineCap = paper.lineJoin = "round"
  paper.lineWidth = (brush / 100) * Math.max(width, height)
  paper.beginPath()
  paper.moveTo(first.x * width, first.y * height)
  for (const spot of rest.length > 0 ? rest : [first]) paper.lineTo(spot.x * width + 0.01, spot.y * height)
  paper.stroke()
}

interface PainterProps {
  picture: string
  /** The strokes of an earlier session, which the user can extend. */
  strokes: readonly Stroke[]
  onCancel: () => void
  onDone: (file: File, strokes: readonly Stroke[]) => void
}

function Painter({ picture, strokes: before, onCancel, onDone }: PainterProps) {
  const canvas = useRef<HTMLCanvasElement>(null)
  const strokes = useRef<Stroke[]>([...before])
  const [count, setCount] = useState(before.length)
  const current = useRef<Stroke | null>(null)
  const keys = useRef<Spot>({ x: 0.5, y: 0.5 })
  // The dialog adopts the picture's shape once the picture has loaded. Strokes painted before that
  // would end up in the wrong place, so there is no canvas until then.
  const [size, setSize] = useState<Size | null>(null)
  const [brush, setBrush] = useState(8)
  const [tool, setTool] = useState<"draw" | "erase">("draw")
  const begin = (spot: Spot) => {
    current.current = { tool, brush, spots: [] }
    strokes.current.push(current.current)
    setCount(strokes.current.length)
    goTo(spot)
  }
  const goTo = (spot: Spot) => {
    const paper = canvas.current?.getContext("2d")
    const stroke = current.current
    if (!paper || !stroke) return
    stroke.spots.push(spot)
    drawStroke(paper, stroke, Math.max(0, stroke.spots.length - 2))
  }
  const redraw = (shown: Stroke[]) => {
    const paper = canvas.current?.getContext("2d")
    current.current = null
    strokes.current = shown
    setCount(shown.length)
    paper?.clearRect(0, 0, paper.canvas.width, paper.canvas.height)
    if (paper) for (const stroke of shown) drawStroke(paper, stroke)
  }
  // biome-ignore lint/correctness/useExhaustiveDependencies: a new size clears the canvas
  useEffect(() => {
    redraw(strokes.current)
    canvas.current?.focus()
  }, [size?.width, size?.height])
  const spotOf = (event: PointerEvent<HTMLCanvasElement>): Spot => {
    const area = event.currentTarget.getBoundingClientRect()
    return { x: (event.clientX - area.left) / area.width, y: (event.clientY - area.top) / area.height }
  }
  const byKey = (event: KeyboardEvent) => {
    const step = event.shiftKey ? 0.1 : 0.02
    const moves: Record<string, Spot> = {
      ArrowLeft: { x: -step, y: 0 },
      ArrowRight: { x: step, y: 0 },
      ArrowUp: { x: 0, y: -step },
      ArrowDown: { x: 0, y: step },
      " ": { x: 0, y: 0 },
    }
    const move = moves[event.key]
    if (!move) return
    event.preventDefault()
    const { x, y } = keys.current
    keys.current = { x: within(x + move.x), y: within(y + move.y) }
    if (event.key === " ") begin(keys.current)
    else goTo(keys.current)
  }
  return (
    <>
      <div
        className="effect-painter"
        style={{ "--ratio": size ? size.width / size.height : 1 } as Record<string, number>}
      >
        <img
          src={picture}
          alt=""
          onLoad={({ currentTarget: { naturalWidth, naturalHeight } }) => {
            if (!naturalWidth) return
            const scale = Math.min(1, SIDE_MAX / Math.max(naturalWidth, naturalHeight))
            setSize({ width: Math.round(naturalWidth * scale), height: Math.round(naturalHeight * scale) })
          }}
        />
        {size && (
          // biome-ignore lint/a11y/noInteractiveElementToNoninteractiveRole: the canvas itself handles the keys
          <canvas
            ref={canvas}
            {...size}
            role="application"
            tabIndex={0}
            aria-label={words.paintByKeys}
            onKeyDown={byKey}
            onPointerDown={(event) => {
              event.currentTarget.setPointerCapture(event.pointerId)
              begin(spotOf(event))
            }}
            onPointerMove={(event) => event.buttons > 0 && goTo(spotOf(event))}
            onPointerUp={() => {
              current.current = null
            }}
          />
        )}
      </div>
      <div className="effect-tools">
        <Choices
          label={words.brush}
          hideLabel
          options={[
            { value: "draw", label: words.draw },
            { value: "erase", label: words.erase },
          ]}
          value={tool}
          onChange={setTool}
        />
        <Slider label={words.brush} value={brush} min={1} max={30} onChange={setBrush} />
        <div className="row">
          <Button
            icon="undo"
            offReason={count === 0 && words.nothingPainted}
            onClick={() => redraw(strokes.current.slice(0, -1))}
          >
            {words.undo}
          </Button>
          <Button offReason={count === 0 && words.nothingPainted} onClick={() => redraw([])}>
            {words.clear}
          </Button>
        </div>
      </div>
      <div className="dialog-actions">
        <Button onClick={onCancel}>{common.cancel}</Button>
        <Button
          kind="go"
          offReason={(count === 0 || !size) && words.paint}
          onClick={() =>
            canvas.current && void fileOf(canvas.current).then((file) => onDone(file, strokes.current))
          }
        >
          {words.usePaint}
        </Button>
      </div>
    </>
  )
}

function within(value: number): number {
  return Math.max(0, Math.min(1, value))
}

/** Exports the mask in white on black without transparency, which mask loaders expect. */
async function fileOf(painted: HTMLCanvasElement): Promise<File> {
  const mask = document.createElement("canvas")
  mask.width = painted.width
  mask.height = painted.height
  const paper = mask.getContext("2d")
  if (paper) {
    paper.fillStyle = "#000"
    paper.fillRect(0, 0, mask.width, mask.height)
    paper.drawImage(painted, 0, 0)
  }
  const blob = await new Promise<Blob | null>((done) => mask.toBlob(done, "image/png"))
  return new File(blob ? [blob] : [], "mask.png", { type: "image/png" })
}
