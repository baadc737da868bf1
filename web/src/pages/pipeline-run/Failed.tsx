/** Lists failed jobs with their errors, and retries one or all of them. */

import { api, cache, useAct, useQuery } from "@/api"
import type { FailureAnswer, Failures, PipelineRunAnswer, RetriedJobs } from "@/api/schema"
import { Button, CopyId, Empty, ErrorNote, Loaded, Skeleton, StateIcon, Time, toast } from "@/ui"
import { words } from "@/words/en/pipelines"
import type { Book } from "./useRun"

const SHOWN_MAX = 100

export function Failed({ book, run }: { book: Book; run: PipelineRunAnswer }) {
  const failures = useQuery<Failures>(`${book.path}/failures`, { query: { limit: SHOWN_MAX } })
  const retry = useAct(async (jobId: string | null) => {
    const { jobs } = await api.post<RetriedJobs>(`${book.path}/retry`, { job_id: jobId })
    toast({ title: words.failed.retried(jobs.length) })
    cache.invalidate(book.path)
  })
  const failed = run.steps.reduce((sum, step) => sum + step.failed, 0)
  return (
    <Loaded query={failures} skeleton={<Skeleton height="180px" />}>
      {({ failures: rows }) =>
        rows.length === 0 ? (
          <Empty title={words.failed.none}>{words.failed.noneText}</Empty>
        ) : (
          <section className="pipeline-run-failed">
            <header>
              <div>
                <h2>{words.failed.title(Math.max(failed, rows.length))}</h2>
                <p className="quiet">{words.failed.text}</p>
              </div>
              <Button kind="go" icon="again" busy={retry.isRunning} onClick={() => void retry.run(null)}>
                {words.failed.retryAll}
              </Button>
            </header>
            {retry.error && <ErrorNote error={retry.error} />}
            <ul>
              {rows.map((row) => (
                <Row key={row.job_id} failure={row} book={book} onRetry={() => void retry.run(row.job_id)} />
              ))}
            </ul>
            {failed > rows.length && <p className="faint">{words.failed.shown(rows.length, failed)}</p>}
          </section>
        )
      }
    </Loaded>
  )
}

function Row({ failure, book, onRetry }: { failure: FailureAnswer; book: Book; onRetry: () => void }) {
  const parent = failure.parent ? book.labels.get(failure.parent) : undefined
  return (
    <li>
      <StateIcon state="failed" />
      <span className="pipeline-run-failed-what">
        <strong>{failure.step}</strong>
        <span className="faint">{failedTitle(failure, parent)}</span>
      </span>
      <span className="pipeline-run-failed-why">{failure.error ?? words.failed.unknown}</span>
      <span className="faint">
        {failure.ended_at && <Time at={failure.ended_at} />} <CopyId id={failure.job_id} />
      </span>
      <Button size="small" icon="again" onClick={onRetry}>
        {words.failed.retry}
      </Button>
    </li>
  )
}

function failedTitle({ is_judge }: FailureAnswer, parent: string | undefined): string {
  if (!parent) return words.failed.base
  return is_judge ? words.failed.judge(parent) : words.failed.of(parent)
}
