/** A short table that can be read on phones, too: there each row is a block with its labels. */

import type { ReactNode } from "react"

export interface ListColumn<Row> {
  key: string
  title: string
  cell: (row: Row) => ReactNode
  /** The row's name: told first on phones, and to screen readers. */
  head?: boolean
  /** Buttons: without a title in view. */
  acts?: boolean
  right?: boolean
  /** As the beginning of a long text may be cut anywhere. */
  mono?: boolean
}

interface ListTableProps<Row> {
  label: string
  columns: readonly ListColumn<Row>[]
  rows: readonly Row[]
  rowKey: (row: Row) => string | number
  /** What is over: struck out. */
  isOver?: (row: Row) => boolean
  isCurrent?: (row: Row) => boolean
}

export function ListTable<Row>({ label, columns, rows, rowKey, isOver, isCurrent }: ListTableProps<Row>) {
  return (
    <table className="list-table" aria-label={label}>
      <thead>
        <tr>
          {columns.map((each) => (
            <th key={each.key} scope="col" className={classOf(each)}>
              {each.acts ? <span className="unseen">{each.title}</span> : each.title}
            </th>
          ))}
        </tr>
      </thead>
      <tbody>
        {rows.map((row) => (
          <tr
            key={rowKey(row)}
            className={isOver?.(row) ? "is-over" : undefined}
            aria-current={isCurrent?.(row) || undefined}
          >
            {columns.map((each) => (
              <Cell key={each.key} column={each} row={row} />
            ))}
          </tr>
        ))}
      </tbody>
    </table>
  )
}

function Cell<Row>({ column, row }: { column: ListColumn<Row>; row: Row }) {
  const inner = column.cell(row)
  if (column.head)
    return (
      <th scope="row" className={classOf(column)}>
        {inner}
      </th>
    )
  return (
    <td data-label={column.acts ? undefined : column.title} className={classOf(column)}>
      {inner}
    </td>
  )
}

function classOf<Row>({ acts, right, mono }: ListColumn<Row>): string | undefined {
  return [acts && "list-acts", right && "right", mono && "mono"].filter(Boolean).join(" ") || undefined
}
