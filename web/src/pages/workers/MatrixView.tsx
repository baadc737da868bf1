/** Shows which worker can run which workflow, with a list of missing items above the table. */

import type { ReactNode } from "react"
import { Link } from "wouter"
import type { Matrix } from "@/api/schema"
import { Badge, Empty, Icon, LinkButton, Panel, StateIcon } from "@/ui"
import { words } from "@/words/en/workers"
import { type Cell, cellOf, type Gap, gapsOf, missingFor } from "./machines"

export function MatrixView({ matrix }: { matrix: Matrix }) {
  const workflows = matrix.workflows.filter((workflow) => workflow.fleets.length > 0)
  if (workflows.length === 0 || matrix.workers.length === 0)
    return (
      <Empty
        title={words.grid.none}
        act={
          <LinkButton kind="go" href="/console/fleets">
            {words.grid.noneAct}
          </LinkButton>
        }
      >
        {words.grid.noneText}
      </Empty>
    )
  return (
    <div className="stack">
      <Gaps gaps={gapsOf(matrix)} />
      {!matrix.is_whole && <p className="faint">{words.grid.cut}</p>}
      <Grid matrix={matrix} />
      <Legend />
    </div>
  )
}

function Gaps({ gaps }: { gaps: readonly Gap[] }) {
  return (
    <Panel title={words.grid.title} aside={<Badge>{gaps.length}</Badge>}>
      {gaps.length === 0 ? (
        <p className="workers-gap">
          <StateIcon state="succeeded" />
          <span>{words.grid.nothing}</span>
        </p>
      ) : (
        <ul className="workers-gaps">
          {gaps.map((gap) => (
            <li key={JSON.stringify([gap.workflow, gap.kind, gap.what])} className="workers-gap">
              <StateIcon state={gap.isEverywhere ? "failed" : "cancelled"} />
              <span>
                <b>{gap.what}</b> <span className="faint">{words.grid.kinds[gap.kind] ?? gap.kind}</span>
              </span>
              <span className="quiet">
                {gap.isEverywhere ? words.grid.everywhere : `${words.grid.on} ${gap.workers.join(", ")}`}
              </span>
              <Link
                className="workers-gap-flow"
                href={`/console/workflows/${encodeURIComponent(gap.workflow)}`}
              >
                {gap.workflow}
              </Link>
            </li>
          ))}
        </ul>
      )}
    </Panel>
  )
}

const MARKS: Readonly<Record<Cell, ReactNode>> = {
  can: <StateIcon state="succeeded" />,
  cannot: <StateIcon state="failed" />,
  unknown: <StateIcon state="queued" />,
  not: <Icon name="minus" size={12} />,
}

function Grid({ matrix }: { matrix: Matrix }) {
  const workflows = matrix.workflows.filter((workflow) => workflow.fleets.length > 0)
  const workers = matrix.workers.filter((worker) => worker.state !== "revoked")
  return (
    // biome-ignore lint/a11y/noNoninteractiveTabindex: keyboard users must be able to scroll a wide table
    <section className="panel workers-grid" aria-label={words.grid.table} tabIndex={0}>
      <table>
        <thead>
          <tr>
            <th scope="col">{words.grid.workflow}</th>
            {workers.map((worker) => (
              <th key={worker.worker_id} scope="col">
                <Link href={`/console/workers/${encodeURIComponent(worker.worker_id)}`}>
                  {worker.worker_id}
                </Link>
                <Badge>{worker.fleet}</Badge>
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {workflows.map(({ workflow, fleets, able, online }) => (
            <tr key={workflow}>
              <th scope="row">
                <Link href={`/console/workflows/${encodeURIComponent(workflow)}`}>{workflow}</Link>
                <Badge>
                  {online > 0 ? words.able(able, online) : words.nobody(drainingIn(workers, fleets))}
                </Badge>
              </th>
              {workers.map((worker) => {
                const cell = cellOf(worker, workflow)
                const title =
                  cell === "cannot"
                    ? words.one.lacks(missingFor(worker, workflow).join(", "))
                    : words.grid[cell]
                return (
                  <td key={worker.worker_id} title={title} data-cell={cell}>
                    {MARKS[cell]}
                    <span className="unseen">{title}</span>
                  </td>
                )
              })}
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  )
}

function drainingIn(workers: Matrix["workers"], fleets: readonly string[]): number {
  return workers.filter((worker) => worker.state === "draining" && fleets.includes(worker.fleet)).length
}

function Legend() {
  return (
    <p className="workers-legend faint" aria-hidden="true">
      {(["can", "cannot", "unknown", "not"] as const).map((cell) => (
        <span key={cell}>
          {MARKS[cell]} {words.grid[cell]}
        </span>
      ))}
    </p>
  )
}
