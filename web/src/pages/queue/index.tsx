/** Shows waiting and running jobs, by workflow and as a list. */

import { useEffect } from "react"
import { useQuery } from "@/api"
import type { BulkFilter, JobCountsAnswer, Overview, WorkflowAnswer, Workflows } from "@/api/schema"
import { notifyFailed, setPaused } from "@/pages/jobs/BulkBar"
import { type Chip, searchOf } from "@/pages/jobs/filter"
import { JobList } from "@/pages/jobs/JobList"
import { Button, duration, Empty, LinkButton, Tabs } from "@/ui"
import { words } from "@/words/en/jobs"

const QUEUE_FILTER: BulkFilter = { status: ["queued", "processing"] }

export default function QueuePage() {
  return (
    <JobList
      title={words.queue}
      path="/console/queue"
      within={QUEUE_FILTER}
      views={(chips, show, version) => <Views chips={chips} show={show} version={version} />}
      above={<Flows />}
      empty={
        <Empty
          title={words.noneWaits}
          act={
            <LinkButton kind="go" href="/console/jobs">
              {words.seeJobs}
            </LinkButton>
          }
        >
          {words.noneWaitsText}
        </Empty>
      }
    />
  )
}

interface ViewsProps {
  chips: readonly Chip[]
  show: (search: string) => void
  version: number
}

function Views({ chips, show, version }: ViewsProps) {
  const counts = useQuery<JobCountsAnswer>("/api/admin/jobs/counts", { freshSeconds: 2 })
  // biome-ignore lint/correctness/useExhaustiveDependencies: reads again after each change
  useEffect(() => {
    if (version > 0) counts.reload()
  }, [version])
  const of = counts.data?.counts
  const both = of && (of.queued ?? 0) + (of.processing ?? 0)
  const tabs = [
    { key: "", title: words.waitsAndRuns, count: both },
    { key: "status=queued", title: words.queued, count: of?.queued },
    { key: "status=processing", title: words.running, count: of?.processing },
  ]
  return <Tabs label={words.views} tabs={tabs} value={searchOf(chips)} onChange={show} />
}

const AGAIN_MS = 5_000

/** Lists workflows with queued jobs, and paused workflows. */
function Flows() {
  const overview = useQuery<Overview>("/api/admin/overview", { query: { range: "1h" }, freshSeconds: 2 })
  const workflows = useQuery<Workflows>("/api/admin/workflows", { freshSeconds: 10 }).data?.workflows
  const { reload } = overview
  useEffect(() => {
    const timer = setInterval(reload, AGAIN_MS)
    return () => clearInterval(timer)
  }, [reload])
  if (!overview.data || !workflows) return <div className="jobs-flows" />
  const { now } = overview.data
  const figures = new Map(overview.data.workflows.map((workflow) => [workflow.workflow, workflow]))
  const inQueue = (workflow: WorkflowAnswer) =>
    (figures.get(workflow.slug)?.queued ?? 0) +
    (figures.get(workflow.slug)?.running ?? 0) +
    (figures.get(workflow.slug)?.held ?? 0)
  const shown = workflows
    .filter((workflow) => workflow.is_paused || inQueue(workflow) > 0)
    .sort((a, b) => inQueue(b) - inQueue(a))
  return (
    <>
      {now.maintenance && <p className="jobs-left-out">{words.maintenance}</p>}
      {now.queued > 0 && <p className="jobs-left-out">{words.oldest(duration(now.oldest_seconds))}</p>}
      {shown.length > 0 && (
        <section className="jobs-flows" aria-label={words.byWorkflow}>
          {shown.map(({ slug, is_paused }) => (
            <div key={slug} className="jobs-flow">
              <div>
                <strong>{slug}</strong>
                <span>
                  {is_paused && `${words.isPaused}, `}
                  {words.inQueue(
                    figures.get(slug)?.queued ?? 0,
                    figures.get(slug)?.running ?? 0,
                    figures.get(slug)?.held ?? 0,
                  )}
                </span>
              </div>
              <Button
                size="small"
                icon={is_paused ? "play" : "pause"}
                label={is_paused ? words.resumeOne(slug) : words.pauseOne(slug)}
                onClick={() => void setPaused(slug, !is_paused).catch(notifyFailed)}
              />
            </div>
          ))}
        </section>
      )}
    </>
  )
}
