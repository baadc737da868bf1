/** A short table that is readable on phones as well, where each row becomes a block with labels. */

import type { ReactNode } from "react"

export interface ListColumn<Row> {
  key: string
  title: string
  cell: (row: Row) => ReactNode
  /** True for the row's name, which comes first on phones and for screen readers. */
  head?: boolean
  /** True for a column of buttons, which has no visible title. */
  acts?: boolean
  right?: boolean
  /** True for a monospaced column whose long values may be cut anywhere. */
  mono?: boolean
}

interface ListTableProps<Row> {
  label: string
  columns: readonly ListColumn<Row>[]
  rows: readonly Row[]
  rowKey: (row: Row) => string | number
  /** True for a row that is no longer valid, such as a revoked key. It is struck through. */
  isOver?: (row: Row) => boolean
  isCurrent?: (row: Row) => boolean
}

export function ListTable<Row>({ label, columns, rows, rowKey, isOver, isCurrent }: ListTableProps<Row>) {
  return (
    <table className="list-table" aria-label={label}>
      <thead>
        <tr>
          {columns.map((column) => (
            <th key={column.key} scope="col" className={classOf(column)}>
              {column.acts ? <span className="unseen">{column.title}</span> : column.title}
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
            {columns.map((column) => (
              <Cell key={column.key} column={column} row={row} />
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
