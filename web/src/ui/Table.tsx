/** A table that renders only the visible rows, so that 100,000 rows cost as much as 30. While it
 * has the focus, J and K or the arrow keys move, X or Space selects, and Enter opens. */

import { useVirtualizer } from "@tanstack/react-virtual"
import { type KeyboardEvent, type ReactNode, useEffect, useId, useRef, useState } from "react"
import { words } from "@/words/en/common"
import { Skeleton } from "./Skeleton"

export interface Column<Row> {
  key: string
  title: ReactNode
  /** The column's track in the CSS grid, such as "120px" or "minmax(0, 1fr)". */
  width: string
  cell: (row: Row) => ReactNode
  align?: "right"
  /** True if the column is hidden at widths of 700 px and below. */
  wideOnly?: boolean
  sort?: "ascending" | "descending" | null
  onSort?: () => void
}

interface TableProps<Row> {
  label: string
  columns: readonly Column<Row>[]
  /** Undefined while the rows are being loaded. */
  rows: readonly Row[] | undefined
  rowKey: (row: Row) => string
  onOpen?: (row: Row) => void
  selected?: ReadonlySet<string>
  onSelect?: (selected: Set<string>) => void
  /** The total number of rows. If more exist than are loaded, `onEnd` is called near the last one. */
  total?: number
  onEnd?: () => void
  empty?: ReactNode
  /** Called with the current row for other keys, such as R or P. */
  onKey?: (key: string, row: Row) => void
  /** Fills the parent's height instead of growing with the number of rows. */
  fill?: boolean
}

const OVERSCAN = 8
const SKELETON_ROWS = 8

export function Table<Row>(props: TableProps<Row>) {
  const { label, rows, rowKey, onOpen, selected, onSelect, total, onEnd, empty, onKey, fill } = props
  const columns = useColumns(props.columns)
  const scroller = useRef<HTMLDivElement>(null)
  const [current, setCurrent] = useState(0)
  const id = useId()
  const height = useRowHeight(scroller)
  const count = rows?.length ?? 0
  const virtual = useVirtualizer({
    count,
    getScrollElement: () => scroller.current,
    estimateSize: () => height,
    overscan: OVERSCAN,
  })
  const items = virtual.getVirtualItems()
  const lastSeen = items.at(-1)?.index ?? -1
  useEffect(() => {
    if (count > 0 && lastSeen >= count - OVERSCAN - 1 && count < (total ?? count)) onEnd?.()
  }, [lastSeen, count, total, onEnd])
  // biome-ignore lint/correctness/useExhaustiveDependencies: measured again only if the height changes
  useEffect(() => virtual.measure(), [height])

  const toggle = (row: Row) => {
    if (!onSelect) return
    const next = new Set(selected)
    if (!next.delete(rowKey(row))) next.add(rowKey(row))
    onSelect(next)
  }
  const move = (to: number) => {
    const index = Math.max(0, Math.min(count - 1, to))
    setCurrent(index)
    virtual.scrollToIndex(index)
  }
  const handleKey = (event: KeyboardEvent) => {
    if (event.target !== event.currentTarget || event.ctrlKey || event.metaKey || event.altKey) return
    const row = rows?.[current]
    const page = Math.max(1, Math.floor((scroller.current?.clientHeight ?? height) / height) - 2)
    const acts: Record<string, () => void> = {
      ArrowDown: () => move(current + 1),
      j: () => move(current + 1),
      ArrowUp: () => move(current - 1),
      k: () => move(current - 1),
      PageDown: () => move(current + page),
      PageUp: () => move(current - page),
      Home: () => move(0),
      End: () => move(count - 1),
      ...(row && { Enter: () => onOpen?.(row), x: () => toggle(row), " ": () => toggle(row) }),
    }
    const act = acts[event.key] ?? (row && onKey && (() => onKey(event.key, row)))
    if (!act) return
    if (acts[event.key]) event.preventDefault()
    act()
  }

  const template = [...(onSelect ? ["36px"] : []), ...columns.map((column) => column.width)].join(" ")
  const line = { gridTemplateColumns: template }
  if (rows && count === 0 && empty) return <>{empty}</>
  return (
    <div
      ref={scroller}
      role="grid"
      className={fill ? "table table-fill" : "table"}
      aria-label={label}
      aria-rowcount={(total ?? count) + 1}
      aria-busy={rows === undefined}
      aria-multiselectable={onSelect ? true : undefined}
      aria-activedescendant={
        count > 0 && items.some((item) => item.index === current) ? `${id}-${current}` : undefined
      }
      tabIndex={0}
      onKeyDown={handleKey}
    >
      <Head
        columns={columns}
        line={line}
        select={
          onSelect && rows
            ? {
                all: count > 0 && selected?.size === count,
                some: (selected?.size ?? 0) > 0,
                set: (all) => onSelect(new Set(all ? rows.map(rowKey) : [])),
              }
            : undefined
        }
      />
      {rows === undefined && <LoadingRows height={height} />}
      <div className="table-space" role="rowgroup" style={{ height: virtual.getTotalSize() }}>
        {items.map(({ index, start }) => {
          const row = rows?.[index]
          if (row === undefined) return null
          const isSelected = selected?.has(rowKey(row)) ?? false
          return (
            // biome-ignore lint/a11y/useKeyWithClickEvents: the grid handles the keys
            <div
              key={rowKey(row)}
              id={`${id}-${index}`}
              role="row"
              aria-rowindex={index + 2}
              aria-selected={onSelect ? isSelected : undefined}
              className={`table-row${index === current ? " is-current" : ""}${onOpen ? " is-link" : ""}`}
              style={{ ...line, height, transform: `translateY(${start}px)` }}
              onClick={(event) => {
                setCurrent(index)
                if (!(event.target as Element).closest("a, button, input, label")) onOpen?.(row)
              }}
            >
              {onSelect && (
                <div role="gridcell" className="table-cell">
                  <label className="check">
                    <input type="checkbox" tabIndex={-1} checked={isSelected} onChange={() => toggle(row)} />
                    <span className="unseen">{words.select}</span>
                  </label>
                </div>
              )}
              {columns.map((column) => (
                <div
                  key={column.key}
                  role="gridcell"
                  className={column.align ? "table-cell is-right" : "table-cell"}
                >
                  {column.cell(row)}
                </div>
              ))}
            </div>
          )
        })}
      </div>
    </div>
  )
}

interface HeadProps<Row> {
  columns: readonly Column<Row>[]
  line: { gridTemplateColumns: string }
  select: { all: boolean; some: boolean; set: (all: boolean) => void } | undefined
}

function Head<Row>({ columns, line, select }: HeadProps<Row>) {
  const setMixed = (box: HTMLInputElement | null) => {
    if (box && select) box.indeterminate = select.some && !select.all
  }
  return (
    <div role="rowgroup" className="table-head">
      <div role="row" className="table-line" aria-rowindex={1} style={line}>
        {select && (
          <div role="columnheader" className="table-cell">
            <label className="check">
              <input
                ref={setMixed}
                type="checkbox"
                checked={select.all}
                onChange={() => select.set(!select.all)}
              />
              <span className="unseen">{words.selectAll}</span>
            </label>
          </div>
        )}
        {columns.map((column) => (
          <div
            key={column.key}
            role="columnheader"
            aria-sort={column.sort ?? undefined}
            className={column.align ? "table-cell is-right" : "table-cell"}
          >
            {column.onSort ? (
              <button type="button" className="table-sort" onClick={column.onSort}>
                {column.title}
                <span aria-hidden="true">
                  {column.sort ? (column.sort === "ascending" ? " ↑" : " ↓") : ""}
                </span>
              </button>
            ) : (
              column.title
            )}
          </div>
        ))}
      </div>
    </div>
  )
}

function LoadingRows({ height }: { height: number }) {
  return (
    <div aria-hidden="true">
      {Array.from({ length: SKELETON_ROWS }, (_, index) => (
        // biome-ignore lint/suspicious/noArrayIndexKey: the placeholders are interchangeable
        <div key={index} className="table-loading" style={{ height }}>
          <Skeleton width={`${80 - index * 6}%`} />
        </div>
      ))}
    </div>
  )
}

/** Returns the row height that the style sheet defines for the current density. */
function useRowHeight(element: { current: HTMLElement | null }): number {
  const [height, setHeight] = useState(40)
  useEffect(() => {
    if (!element.current) return
    const pixels = Number.parseFloat(getComputedStyle(element.current).getPropertyValue("--row-h"))
    if (pixels > 0) setHeight(pixels)
  })
  return height
}

const NARROW = "(max-width: 700px)"

function useColumns<Row>(columns: readonly Column<Row>[]): readonly Column<Row>[] {
  const [isNarrow, setNarrow] = useState(() => window.matchMedia(NARROW).matches)
  useEffect(() => {
    const media = window.matchMedia(NARROW)
    const note = () => setNarrow(media.matches)
    media.addEventListener("change", note)
    return () => media.removeEventListener("change", note)
  }, [])
  return isNarrow ? columns.filter((column) => !column.wideOnly) : columns
}
