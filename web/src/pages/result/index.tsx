/** The result page of an effect's job. Its address stays the same from submission to the end. */

import { useQuery } from "@/api"
import type { JobAnswer } from "@/api/schema"
import { Empty, ErrorNote, LinkButton, Skeleton, useTitle } from "@/ui"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/result"
import { Failure } from "./Failure"
import { isActive, useFollowed } from "./follow"
import { Making } from "./Making"
import { Result } from "./Result"
import "./result.css"

export default function ResultPage({ id }: { id: string }) {
  const { job, error, preview, reload } = useFollowed(id)
  const hasEnded = job !== undefined && !isActive(job)
  const path = `/api/ai-jobs/${encodeURIComponent(id)}`
  const whole = useQuery<JobAnswer>(hasEnded ? path : null)
  useTitle(job?.effect_title ?? words.title)
  if (!job) {
    if (error?.isMissing) return <NotFound />
    if (error)
      return (
        <div className="page">
          <ErrorNote error={error} onRetry={reload} />
        </div>
      )
    return <Coming />
  }
  if (!hasEnded) return <Making job={job} preview={preview} />
  if (whole.data === undefined && whole.error)
    return (
      <div className="page">
        <ErrorNote error={whole.error} onRetry={whole.reload} />
      </div>
    )
  if (whole.data === undefined) return <Coming />
  if (job.status === "completed")
    return <Result key={id} job={whole.data} followed={job} reload={whole.reload} />
  return <Failure key={id} job={whole.data} followed={job} />
}

function NotFound() {
  return (
    <div className="page">
      <Empty
        title={words.notFound}
        act={
          <LinkButton kind="go" href="/media">
            {words.allMedia}
          </LinkButton>
        }
      >
        {words.notFoundText}
      </Empty>
    </div>
  )
}

/** A placeholder with the size of the content. */
function Coming() {
  return (
    <div className="result" aria-busy="true">
      <div className="result-stage" />
      <div className="result-under">
        <Skeleton width="240px" height="28px" />
        <span className="unseen">{common.loading}</span>
      </div>
    </div>
  )
}
