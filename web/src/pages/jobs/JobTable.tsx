/** The table of jobs, with state, progress or error, and duration. */

import { useMemo } from "react"
import type { JobListed } from "@/api/schema"
import { duration, Progress, Status, shortId, stateOf, Time, useNow } from "@/ui"
import { type Column, Table } from "@/ui/Table"
import { words } from "@/words/en/jobs"
import { spansOf } from "./rows"
import type { Jobs } from "./useJobs"

interface JobTableProps {
  label: string
  jobs: Jobs
  tenantNames: ReadonlyMap<string, string>
  selected: ReadonlySet<string>
  onSelect: (selected: Set<string>) => void
  onOpen: (row: JobListed) => void
  onKey: (key: string, row: JobListed) => void
  empty: React.ReactNode
}

export function JobTable({
  label,
  jobs,
  tenantNames,
  selected,
  onSelect,
  onOpen,
  onKey,
  empty,
}: JobTableProps) {
  const columns = useMemo(() => columnsOf(tenantNames), [tenantNames])
  const { rows, hasMore } = jobs
  return (
    <Table
      fill
      label={label}
      columns={columns}
      rows={rows}
      rowKey={(row) => row.id}
      total={(rows?.length ?? 0) + (hasMore ? 1 : 0)}
      onEnd={jobs.loadMore}
      selected={selected}
      onSelect={onSelect}
      onOpen={onOpen}
      onKey={onKey}
      empty={empty}
    />
  )
}

/** A worker may hold a job that it hasn't started. */
function JobState({ row }: { row: JobListed }) {
  if (row.status === "processing" && row.started_at === null)
    return <Status status="queued">{words.held}</Status>
  return <Status status={row.status} />
}

function columnsOf(tenantNames: ReadonlyMap<string, string>): Column<JobListed>[] {
  const { columns } = words
  const right = { align: "right", wideOnly: true } as const
  return [
    { key: "state", title: columns.state, width: "124px", cell: (row) => <JobState row={row} /> },
    {
      key: "job",
      title: columns.job,
      width: "104px",
      wideOnly: true,
      cell: (row) => (
        <span className="mono" title={row.id}>
          {shortId(row.id)}
        </span>
      ),
    },
    { key: "workflow", title: columns.workflow, width: "minmax(96px, 1fr)", cell: (row) => row.workflow },
    {
      key: "tenant",
      title: columns.tenant,
      width: "minmax(80px, 1fr)",
      wideOnly: true,
      cell: (row) => tenantNames.get(row.tenant_id) ?? shortId(row.tenant_id),
    },
    {
      key: "stands",
      title: columns.stands,
      width: "minmax(140px, 2.4fr)",
      wideOnly: true,
      cell: (row) => <ProgressOrError row={row} />,
    },
    {
      key: "worker",
      title: columns.worker,
      width: "minmax(90px, 1fr)",
      wideOnly: true,
      cell: (row) => <span className="mono">{row.worker_id}</span>,
    },
    { key: "priority", title: columns.priority, width: "72px", ...right, cell: (row) => row.priority || "" },
    {
      key: "attempt",
      title: columns.attempt,
      width: "72px",
      ...right,
      cell: (row) => (row.attempt > 1 ? row.attempt : ""),
    },
    {
      key: "waited",
      title: columns.waited,
      width: "88px",
      ...right,
      cell: (row) => <Span row={row} of="waited" />,
    },
    { key: "ran", title: columns.ran, width: "88px", ...right, cell: (row) => <Span row={row} of="ran" /> },
    {
      key: "age",
      title: columns.age,
      width: "96px",
      align: "right",
      cell: (row) => (
        <span className="faint">
          <Time at={row.submitted_at} />
        </span>
      ),
    },
  ]
}

function ProgressOrError({ row }: { row: JobListed }) {
  if (row.status === "processing")
    return (
      <span className="jobs-bar">
        <Progress
          label={words.progress(shortId(row.id))}
          value={row.percent === null ? null : row.percent / 100}
          withPercent
        />
      </span>
    )
  if (row.error)
    return (
      <span className={`is-${stateOf(row.status)} jobs-error`} title={row.error}>
        {row.error}
      </span>
    )
  return null
}

function Span({ row, of }: { row: JobListed; of: "waited" | "ran" }) {
  const seconds = spansOf(row, useNow())[of]
  return <>{seconds === null ? "" : duration(seconds)}</>
}
