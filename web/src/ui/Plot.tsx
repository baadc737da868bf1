/** A plot over time. The library loads with the first plot, and the box has its final size
 * before that. */

import { useEffect, useRef } from "react"
import type uPlot from "uplot"
import "uplot/dist/uPlot.min.css"
import { useTheme } from "@/app/theme"

export interface Series {
  label: string
  /** One value per moment. Null means no value. */
  values: readonly (number | null)[]
  dashed?: boolean
  /** One of the four colors. The default depends on the position of the series. */
  colour?: 1 | 2 | 3 | 4
}

interface PlotProps {
  /** Describes the plot and its latest value for screen readers. */
  label: string
  /** Seconds since 1970. */
  moments: readonly number[]
  series: readonly Series[]
  height?: number
  format?: (value: number) => string
  /** Draws a small chart without axes, for use inside a row. */
  spark?: boolean
  /** The value range, instead of 0 to slightly above the highest value. */
  range?: readonly [number, number]
  /** True for counts, which get no grid lines between whole numbers. */
  whole?: boolean
  /** The length of the time axis in seconds, up to the last moment. By default the axis starts at
   * the first moment. */
  spanSeconds?: number
}

const WHOLE_STEPS = [0, 1, 2, 3, 4, 5, 6, 7, 8].flatMap((power) =>
  [1, 2, 5].map((digit) => digit * 10 ** power),
)

export function Plot({
  label,
  moments,
  series,
  height = 120,
  format,
  spark = false,
  range,
  whole = false,
  spanSeconds,
}: PlotProps) {
  const box = useRef<HTMLDivElement>(null)
  const plot = useRef<uPlot | null>(null)
  const theme = useTheme()
  const data = useRef<uPlot.AlignedData>([[]])
  data.current = [[...moments], ...series.map((line) => [...line.values])]
  const shape = JSON.stringify([
    series.map(({ label, dashed, colour }) => [label, dashed, colour]),
    height,
    spark,
    range,
    whole,
    spanSeconds,
    theme.shown,
  ])
  // biome-ignore lint/correctness/useExhaustiveDependencies: a plot is rebuilt only if its shape changes
  useEffect(() => {
    const place = box.current
    if (!place) return undefined
    let isGone = false
    const sized = new ResizeObserver(() => plot.current?.setSize({ width: place.clientWidth, height }))
    void import("uplot").then(({ default: Made }) => {
      if (isGone) return
      const options = optionsOf(place, series, { height, spark, format, range, whole, spanSeconds })
      plot.current = new Made(options, data.current, place)
      sized.observe(place)
    })
    return () => {
      isGone = true
      sized.disconnect()
      plot.current?.destroy()
      plot.current = null
    }
  }, [shape])
  useEffect(() => {
    plot.current?.setData(data.current)
  })
  return <div ref={box} className="plot" role="img" aria-label={label} style={{ height }} />
}

type Look = Required<Pick<PlotProps, "height" | "spark" | "whole">> & {
  format: PlotProps["format"]
  range: PlotProps["range"]
  spanSeconds: PlotProps["spanSeconds"]
}

/** Returns a time range that ends at the last moment. Without it, the library shows a whole day
 * for a single moment. */
function spanBefore(plot: uPlot, max: number, seconds: number): [number, number] {
  const last = plot.data[0]?.at(-1) ?? max
  return [last - seconds, last]
}

/** Removes labels that the right edge would cut off. */
function withoutCut(plot: uPlot, moments: readonly number[], labels: readonly string[]): string[] {
  const width = plot.bbox.width / devicePixelRatio
  const half = (label: string) => (label.length * LETTER) / 2 - PADDING_RIGHT
  return labels.map((label, at) => (plot.valToPos(moments[at] ?? 0, "x") > width - half(label) ? "" : label))
}

// In pixels. LETTER is the approximate width of a label's character.
const PADDING_RIGHT = 8
const LETTER = 6.7
const AXIS_PADDING = 14

/** Returns the index of the latest value, which is marked with a dot. */
function lastPoint(plot: uPlot, index: number): number[] {
  const values = plot.data[index] ?? []
  for (let at = values.length - 1; at >= 0; at -= 1) if (values[at] != null) return [at]
  return []
}

function optionsOf(
  place: HTMLElement,
  series: readonly Series[],
  { height, spark, whole, format, range, spanSeconds }: Look,
): uPlot.Options {
  const style = getComputedStyle(place)
  const colour = (name: string) => style.getPropertyValue(name).trim()
  const font = `11px ${colour("--mono")}`
  const axis = { stroke: colour("--ink-3"), font, ticks: { show: false } }
  const grid = { stroke: colour("--plot-grid"), width: 1 }
  return {
    width: place.clientWidth,
    height,
    padding: spark ? [4, 4, 2, 2] : [8, PADDING_RIGHT, 0, 0],
    cursor: { show: false },
    legend: { show: false },
    scales: {
      x: spanSeconds ? { range: (plot, _min, max) => spanBefore(plot, max, spanSeconds) } : {},
      y: { range: (_plot, _min, max) => (range ? [...range] : [0, max > 0 ? max * 1.1 : 1]) },
    },
    axes: spark
      ? [{ show: false }, { show: false }]
      : [
          {
            ...axis,
            grid: { show: false },
            space: 80,
            size: 24,
            values: (plot, splits) => withoutCut(plot, splits, momentLabels(splits)),
          },
          {
            ...axis,
            grid,
            space: 30,
            size: (_plot, labels) =>
              AXIS_PADDING + LETTER * Math.max(3, ...(labels ?? []).map((text) => text.length)),
            ...(whole ? { incrs: WHOLE_STEPS } : {}),
            values: (_plot, splits) => splits.map((value) => format?.(value) ?? String(value)),
          },
        ],
    series: [
      {},
      ...series.map((line, index) => {
        const ink = colour(`--plot-${line.colour ?? (index % 4) + 1}`)
        return {
          label: line.label,
          stroke: ink,
          width: 1.5,
          // A step without finished jobs has no value, so the line continues to the next step with
          // one.
          spanGaps: true,
          points: line.dashed
            ? { show: false }
            : { show: true, size: 6, width: 0, fill: ink, filter: lastPoint },
          ...(line.dashed ? { dash: [4, 3] } : {}),
          ...(index === 0 && !line.dashed ? { fill: `${ink}1a` } : {}),
        }
      }),
    ],
  }
}

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" })
const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric" })
const DAYS_SECONDS = 36 * 3600

/** Formats the moments as times, or as days if they span more than a day and a half. */
export function momentLabels(moments: readonly number[]): string[] {
  const span = (moments.at(-1) ?? 0) - (moments[0] ?? 0)
  const format = span > DAYS_SECONDS ? day : clock
  return moments.map((seconds) => format.format(new Date(seconds * 1000)))
}
