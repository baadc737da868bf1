/** Lists runs, newest first, each with a strip of its best pictures. */

import { useEffect, useRef } from "react"
import { Link } from "wouter"
import { cache, useAccountEvents, usePages, useQuery } from "@/api"
import type { CandidatePage, PipelineRunSummaries, PipelineRunSummary } from "@/api/schema"
import { Button, Empty, ErrorNote, Icon, Loaded, Pencil, Skeleton, Status, Time, tokens } from "@/ui"
import { words } from "@/words/en/pipelines"
import { reasonOf } from "../pipeline-run/state"

const PAGE = 12
const PRINTS = 5
const BATCH_MS = 1_000

export function Runs({ pipelineId }: { pipelineId?: string }) {
  const pages = usePages<PipelineRunSummary, PipelineRunSummaries>(
    "/api/pipeline-runs",
    { limit: PAGE, pipeline_id: pipelineId },
    (answer) => answer.runs,
  )
  useLive()
  return (
    <Loaded query={pages.first} skeleton={<Skeleton height="200px" />}>
      {() => (
        <>
          {pages.rows?.length === 0 && <Empty title={words.noRuns}>{words.noRunsText}</Empty>}
          <ul className="pipelines-runs">
            {pages.rows?.map((run) => (
              <li key={run.id}>
                <Run run={run} />
              </li>
            ))}
          </ul>
          {pages.more.error && <ErrorNote error={pages.more.error} />}
          {pages.hasMore && (
            <Button busy={pages.more.isRunning} onClick={() => void pages.more.run()}>
              {words.olderRuns}
            </Button>
          )}
        </>
      )}
    </Loaded>
  )
}

/** Reads runs again after some of their jobs have ended. */
function useLive(): void {
  const timer = useRef<ReturnType<typeof setTimeout> | null>(null)
  useEffect(() => () => void (timer.current && clearTimeout(timer.current)), [])
  const later = () => {
    timer.current ??= setTimeout(() => {
      timer.current = null
      cache.invalidate("/api/pipeline-runs")
    }, BATCH_MS)
  }
  useAccountEvents((job) => job.completed_at && later(), later)
}

function Run({ run }: { run: PipelineRunSummary }) {
  const { state, word } = reasonOf(run)
  return (
    <Link href={`/pipelines/${run.pipeline_id}/runs/${run.id}`} className="pipelines-run">
      <Prints run={run} />
      <span className="pipelines-run-text">
        <strong className="cut-text">{run.pipeline}</strong>
        <Status status={state}>{word}</Status>
        <span className="faint">
          {tokens(run.tokens)}, <Time at={run.created_at} />
        </span>
      </span>
    </Link>
  )
}

function Prints({ run }: { run: PipelineRunSummary }) {
  const best = useQuery<CandidatePage>(`/api/pipeline-runs/${run.id}/candidates`, {
    query: { best: true, limit: PRINTS },
    freshSeconds: 5,
  })
  const prints = best.data?.candidates ?? []
  return (
    <span className="pipelines-prints" aria-hidden="true">
      {Array.from({ length: PRINTS }, (_, index) => {
        const print = prints[index]
        const isShown = print?.url && print.content_type.startsWith("image/")
        return (
          // biome-ignore lint/suspicious/noArrayIndexKey: a print is identified by its position in the strip
          <span key={index} className={print ? "print" : "print pipelines-none"}>
            {isShown && print.url && (
              <img src={print.small_url ?? print.url} alt="" loading="lazy" decoding="async" />
            )}
            {print && !isShown && (print.text ?? <Icon name="picture" />)}
            {print?.status === "winner" && <Pencil kind="frame" />}
          </span>
        )
      })}
    </span>
  )
}
