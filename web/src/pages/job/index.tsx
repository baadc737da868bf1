/** The job page in the console, with the job's error and the likely next step, its attempts, inputs
 * and outputs. */

import { useEffect, useRef, useState } from "react"
import { Link, useLocation } from "wouter"
import { api, useAct, useEvents, useQuery } from "@/api"
import type { AbleWorkers, BulkAnswer, JobDetails, ReplayedJob, Tenants } from "@/api/schema"
import { AskPriority } from "@/pages/jobs/BulkBar"
import { actOn } from "@/pages/jobs/bulk"
import type { JobEvent } from "@/pages/jobs/rows"
import { EVENTS } from "@/pages/jobs/useJobs"
import {
  Button,
  Confirm,
  CopyButton,
  CopyId,
  Crumb,
  Empty,
  ErrorNote,
  LinkButton,
  Loaded,
  Page,
  Panel,
  Progress,
  StateIcon,
  Status,
  shortId,
  Time,
  toast,
  tokens,
} from "@/ui"
import { words } from "@/words/en/job"
import { Attempts } from "./Attempts"
import { isRefunded, retryOf } from "./axis"
import { Details } from "./Details"
import { Files } from "./Files"
import { History } from "./History"
import { readError } from "./rawError"
import "./job.css"

const AGAIN_MS = 500

export default function JobPage({ id }: { id: string }) {
  const path = `/api/admin/jobs/${encodeURIComponent(id)}/details`
  const query = useQuery<JobDetails>(path, { query: { files: false } })
  useLive(id, query.reload)
  return (
    <Page
      className="job"
      title={words.title(shortId(id))}
      head={query.data?.workflow ?? words.title(shortId(id))}
      aside={query.data && <Status status={query.data.status} pill />}
      actions={query.data && <Acts job={query.data} reload={query.reload} />}
    >
      <Crumb href="/console/jobs" list={words.jobs}>
        <CopyId id={id} whole />
      </Crumb>
      <Loaded
        query={query}
        missing={
          <Empty title={words.none} act={<LinkButton href="/console/jobs">{words.all}</LinkButton>}>
            {words.noneText}
          </Empty>
        }
      >
        {(job) => <Whole job={job} path={path} />}
      </Loaded>
    </Page>
  )
}

/** Reads the job again when events report a change, at most twice a second. */
function useLive(id: string, reload: () => void): void {
  const timer = useRef<ReturnType<typeof setTimeout> | null>(null)
  useEvents<{ jobs: JobEvent[] }>(EVENTS, (data, { event }) => {
    if (event !== "jobs" || !data.jobs.some((job) => job.id === id)) return
    timer.current ??= setTimeout(() => {
      timer.current = null
      reload()
    }, AGAIN_MS)
  })
  useEffect(
    () => () => {
      if (timer.current) clearTimeout(timer.current)
    },
    [],
  )
}

function Whole({ job, path }: { job: JobDetails; path: string }) {
  return (
    <>
      <Facts job={job} />
      {job.status === "failed" && <Failure job={job} />}
      {job.why && (
        <div className="note" role="note">
          <StateIcon state={job.status === "queued" ? "queued" : "running"} />
          <div className="note-text">
            <strong>{job.status === "queued" ? words.why : words.stands}</strong>
            <span>{job.why}</span>
          </div>
        </div>
      )}
      {job.status === "processing" && <Running job={job} />}
      <Attempts job={job} />
      <div className="job-parts">
        <History job={job} />
        <Files job={job} path={path} />
        <Details job={job} />
      </div>
    </>
  )
}

function Facts({ job }: { job: JobDetails }) {
  const tenants = useQuery<Tenants>("/api/admin/tenants", { freshSeconds: 60 }).data?.tenants
  const tenant = tenants?.find((tenant) => tenant.id === job.tenant_id)?.name ?? shortId(job.tenant_id)
  const { facts } = words
  const worker = job.dispatch?.worker_id
  const retry = retryOf(job)
  return (
    <dl className="job-facts">
      <Fact name={facts.tenant}>
        <Link href={`/console/tenants/${job.tenant_id}`}>{tenant}</Link>
      </Fact>
      <Fact name={facts.workflow}>
        <Link href={`/console/workflows/${encodeURIComponent(job.workflow)}`}>
          {words.version(job.workflow, job.version)}
        </Link>
      </Fact>
      {job.effect && (
        <Fact name={facts.effect}>
          <Link href={`/console/effects/${encodeURIComponent(job.effect)}`}>{job.effect}</Link>
        </Fact>
      )}
      <Fact name={facts.stage}>{job.stage}</Fact>
      <Fact name={facts.priority}>{job.priority}</Fact>
      {worker && (
        <Fact name={facts.worker}>
          <Link href={`/console/workers/${encodeURIComponent(worker)}`}>{worker}</Link>
        </Fact>
      )}
      {job.backend_affinity && <Fact name={facts.affinity}>{job.backend_affinity}</Fact>}
      {job.reserved_tokens > 0 && (
        <Fact name={isRefunded(job.status) ? facts.givenBack : facts.tokens}>
          {tokens(job.reserved_tokens)}
        </Fact>
      )}
      {job.retry_of && (
        <Fact name={facts.retryOf}>
          <Link href={`/console/jobs/${job.retry_of}`}>{shortId(job.retry_of)}</Link>
        </Fact>
      )}
      {retry && (
        <Fact name={facts.retriedAs}>
          <Link href={`/console/jobs/${retry}`}>{shortId(retry)}</Link>
        </Fact>
      )}
      {job.prompt_id && <Fact name={facts.promptId}>{job.prompt_id}</Fact>}
      {job.provider_job_id && <Fact name={facts.providerJobId}>{job.provider_job_id}</Fact>}
      {job.run_kind && <Fact name={facts.run}>{words.runOf(job.run_kind)}</Fact>}
      <Fact name={facts.submitted}>
        <Time at={job.submitted_at} />
      </Fact>
    </dl>
  )
}

function Fact({ name, children }: { name: string; children: React.ReactNode }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  )
}

function useReplay(job: JobDetails) {
  const [, go] = useLocation()
  return useAct(async (worker: string | null) => {
    const body = worker === null ? {} : { backend_affinity: `worker:${worker}` }
    const newJob = await api.post<ReplayedJob>(`/api/admin/jobs/${job.id}/replay`, body)
    notifyNewJob(words.replayed, newJob.job_id, go)
  })
}

function notifyNewJob(title: string, id: string, go: (to: string) => void): void {
  toast({ title, text: shortId(id), act: { label: words.openIt, run: () => go(`/console/jobs/${id}`) } })
}

/** Shows the error, and a worker that could run the job. */
function Failure({ job }: { job: JobDetails }) {
  const path = `/api/admin/workflows/${encodeURIComponent(job.workflow)}/workers`
  const able = useQuery<AbleWorkers>(path, { query: { version: job.version }, freshSeconds: 30 }).data
    ?.workers
  const failed = job.dispatch?.worker_id
  const other = able?.find((worker) => worker.can_run && worker.worker_id !== failed)
  const own = able?.find((worker) => worker.worker_id === failed)
  const missing = Object.values(own?.missing ?? {}).flat()
  const replay = useReplay(job)
  const raw = job.raw_error ? readError(job.raw_error) : null
  return (
    <>
      <div className="note note-bad job-failure" role="note">
        <StateIcon state="failed" />
        <div className="note-text">
          <strong>{job.error ?? words.failedWithout}</strong>
          {raw?.title && <span>{raw.title}</span>}
          {raw?.nodeId && <span>{words.inNode(raw.nodeId, raw.nodeType)}</span>}
          {missing.length > 0 && <span>{words.missing(missing.join(", "))}</span>}
          {able && <span>{other ? words.couldRun(other.worker_id) : words.noneCouldRun}</span>}
        </div>
        <div className="note-acts">
          {other && job.can.replay && (
            <Button size="small" busy={replay.isRunning} onClick={() => void replay.run(other.worker_id)}>
              {words.replayOn(other.worker_id)}
            </Button>
          )}
        </div>
      </div>
      {replay.error && <ErrorNote error={replay.error} />}
    </>
  )
}

function Running({ job }: { job: JobDetails }) {
  const { percent, node, step, steps } = job.progress ?? {}
  return (
    <Panel className="job-running">
      <Progress label={words.progress} value={percent == null ? null : percent / 100} withPercent />
      <span className="mono">
        {[node != null && words.node(node), step != null && steps != null && words.step(step, steps)]
          .filter(Boolean)
          .join(" · ")}
      </span>
    </Panel>
  )
}

function Acts({ job, reload }: { job: JobDetails; reload: () => void }) {
  const [, go] = useLocation()
  const [dialog, setDialog] = useState<"cancel" | "priority" | null>(null)
  const replay = useReplay(job)
  const retry = useAct(async () => {
    const answer = await api.post<BulkAnswer>("/api/admin/jobs/bulk", { act: "retry", ids: [job.id] })
    const newId = answer.retries[job.id]
    if (!newId) throw new Error(answer.failed[0]?.message ?? words.cannot.retry)
    notifyNewJob(words.retried, newId, go)
    reload()
  })
  const retried = retryOf(job)
  const act = async (kind: "cancel" | "reprioritise", title: string, priority: number | null = null) => {
    const { failed } = await actOn(kind, { ids: [job.id] }, priority)
    if (failed[0]) throw new Error(failed[0].message)
    toast({ title: title, state: kind === "cancel" ? "cancelled" : "succeeded" })
    reload()
  }
  const error = retry.error ?? replay.error
  const address = `${window.location.origin}/api/admin/jobs/${job.id}/details`
  const curl = `curl -H "Authorization: Bearer $COMFYFLEET_ADMIN_KEY" ${address}`
  const isActive = job.can.cancel
  return (
    <>
      <CopyButton text={curl} label={words.curl} />
      {isActive ? (
        <>
          <Button
            offReason={!job.can.reprioritise && words.cannot.reprioritise}
            onClick={() => setDialog("priority")}
          >
            {words.priority}
          </Button>
          <Button kind="stop" onClick={() => setDialog("cancel")}>
            {words.cancel}
          </Button>
        </>
      ) : (
        <>
          <Button
            icon="play"
            busy={replay.isRunning}
            offReason={!job.can.replay && words.cannot.replay}
            onClick={() => void replay.run(null)}
          >
            {words.replay}
          </Button>
          {retried ? (
            <LinkButton kind="ink" href={`/console/jobs/${retried}`}>
              {words.openRetry}
            </LinkButton>
          ) : (
            <Button
              kind="ink"
              icon="again"
              busy={retry.isRunning}
              offReason={!job.can.retry && words.cannot.retry}
              onClick={() => void retry.run()}
            >
              {words.retry}
            </Button>
          )}
        </>
      )}
      {error && <ErrorNote error={error} />}
      <Confirm
        open={dialog === "cancel"}
        onClose={() => setDialog(null)}
        title={words.askCancel}
        act={words.actCancel}
        onConfirm={() => act("cancel", words.cancelled)}
      >
        {words.askCancelText}
      </Confirm>
      <AskPriority
        open={dialog === "priority"}
        title={words.askPriority}
        onClose={() => setDialog(null)}
        onSet={(priority) => act("reprioritise", words.prioritySet(priority), priority)}
      />
    </>
  )
}
