/** Compares two documents line by line. */

export interface DiffLine {
  readonly kind: "same" | "gone" | "new"
  readonly text: string
}

/** The maximum table size, in cells, for computing the longest common subsequence of two texts. If
 * a comparison would exceed it, all old lines count as removed and all new lines as added. */
const CELLS_MAX = 4_000_000

export function diffOf(before: string, after: string): DiffLine[] {
  const old = before.trimEnd().split("\n")
  const now = after.trimEnd().split("\n")
  if (old.length * now.length > CELLS_MAX)
    return [...old.map((text) => line("gone", text)), ...now.map((text) => line("new", text))]
  const width = now.length + 1
  const lengths = new Uint16Array((old.length + 1) * width)
  const at = (row: number, column: number) => lengths[row * width + column] ?? 0
  for (let row = old.length - 1; row >= 0; row -= 1)
    for (let column = now.length - 1; column >= 0; column -= 1)
      lengths[row * width + column] =
        old[row] === now[column]
          ? at(row + 1, column + 1) + 1
          : Math.max(at(row + 1, column), at(row, column + 1))
  const lines: DiffLine[] = []
  let row = 0
  let column = 0
  while (row < old.length || column < now.length) {
    if (row < old.length && column < now.length && old[row] === now[column]) {
      lines.push(line("same", old[row] ?? ""))
      row += 1
      column += 1
    } else if (row < old.length && (column >= now.length || at(row + 1, column) >= at(row, column + 1))) {
      lines.push(line("gone", old[row] ?? ""))
      row += 1
    } else {
      lines.push(line("new", now[column] ?? ""))
      column += 1
    }
  }
  return lines
}

function line(kind: DiffLine["kind"], text: string): DiffLine {
  return { kind, text }
}
