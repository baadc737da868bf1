/** Runs one job of a workflow, so that an operator can check the result. */

import { type FormEvent, useEffect, useRef, useState } from "react"
import { useLocation, useSearch } from "wouter"
import { ApiError, api, useAct, useEvents, useQuery } from "@/api"
import type { AdminUpload, JobDetails, JobIds, WorkflowDetail } from "@/api/schema"
import { OneField } from "@/pages/effect/Fields"
import {
  type FormField,
  initialValues,
  isMedia,
  mistakesOf,
  propertiesOf,
  type Values,
} from "@/pages/effect/form"
import { Files } from "@/pages/job/Files"
import type { JobEvent } from "@/pages/jobs/rows"
import { EVENTS } from "@/pages/jobs/useJobs"
import { PickButton } from "@/pages/workflows/Drop"
import { fieldOf } from "@/pages/workflows/draft"
import { Button, bytes, ErrorNote, LinkButton, Loaded, Panel, Progress, Select, Skeleton, Status } from "@/ui"
import { words as effect } from "@/words/en/effect"
import { words } from "@/words/en/workflows"
import { optionsOf, Use } from "./Versions"
import "@/pages/job/job.css"

type TestFiles = Readonly<Record<string, File>>

interface OfWorkflow {
  workflow: WorkflowDetail
  path: string
}

/** Runs a test of any version, even if no jobs use that version yet. */
export function TestPart({ workflow, path }: OfWorkflow) {
  const requested = Number(new URLSearchParams(useSearch()).get("version"))
  const [here, go] = useLocation()
  const chosen = workflow.versions.includes(requested) ? requested : workflow.version
  const isOther = chosen !== workflow.version
  const other = useQuery<WorkflowDetail>(isOther ? path : null, { query: { version: chosen } })
  return (
    <div className="stack">
      {workflow.versions.length > 1 && (
        <div className="workflow-choose">
          <Select
            label={words.tried}
            options={optionsOf(workflow)}
            value={String(chosen)}
            onChange={(version) => go(`${here}?part=test&version=${version}`, { replace: true })}
          />
          <Use key={chosen} workflow={workflow} path={path} version={chosen} />
        </div>
      )}
      {isOther && <p className="quiet">{words.draftText(chosen, workflow.version)}</p>}
      {isOther ? (
        <Loaded query={other} skeleton={<Skeleton height="220px" />}>
          {(details) => <TestRun key={chosen} workflow={details} version={chosen} />}
        </Loaded>
      ) : (
        <TestRun key={chosen} workflow={workflow} version={chosen} />
      )}
    </div>
  )
}

function TestRun({ workflow, version }: { workflow: WorkflowDetail; version: number }) {
  const fields = workflow.properties.map((property) => fieldOf(property))
  const [values, setValues] = useState<Values>(() => initialValues(fields.filter((field) => !isMedia(field))))
  const [files, setFiles] = useState<TestFiles>({})
  const [isTried, setTried] = useState(false)
  const [job, setJob] = useState<string | null>(null)
  const mistakes = mistakesOf(fields, { ...values, ...files })
  const run = useAct(async () => {
    const answer = await submit({ workflow_slug: workflow.slug, version }, fields, values, files)
    setJob(answer.ids[0] ?? null)
    return answer
  })
  const [warning, setWarning] = useState<string | null>(null)
  const start = async (event: FormEvent) => {
    event.preventDefault()
    setTried(true)
    if (Object.keys(mistakes).length > 0) return
    const answer = await run.run()
    setWarning(answer?.warnings[0] ?? null)
  }
  return (
    <div className="workflow-test">
      <Panel title={words.testRun}>
        <form className="workflow-form" onSubmit={(event) => void start(event)} noValidate>
          <p className="quiet">{fields.length === 0 ? words.nothingToSet : words.testText}</p>
          {fields.map((field) =>
            isMedia(field) ? (
              <FileField
                key={field.name}
                field={field}
                file={files[field.name]}
                error={isTried ? (mistakes[field.name] ?? null) : null}
                onFile={(file) => setFiles((before) => ({ ...before, [field.name]: file }))}
              />
            ) : (
              <OneField
                key={field.name}
                field={field}
                value={values[field.name]}
                error={isTried ? (mistakes[field.name] ?? null) : null}
                onChange={(value) => setValues((before) => ({ ...before, [field.name]: value }))}
              />
            ),
          )}
          {run.error && <ErrorNote error={run.error} />}
          <Button kind="go" type="submit" icon="play" busy={run.isRunning}>
            {job ? words.runAgain : words.run}
          </Button>
        </form>
      </Panel>
      {job && <Outcome key={job} id={job} warning={warning} />}
    </div>
  )
}

function FileField({
  field,
  file,
  error,
  onFile,
}: {
  field: FormField
  file: File | undefined
  error: string | null
  onFile: (file: File) => void
}) {
  const kind = field.kind === "mask" ? "image" : field.kind
  return (
    <div className="field">
      <span className="field-label">{field.label}</span>
      <span className="row row-wrap">
        <PickButton accept={`${kind}/*`} label={words.file(field.label)} size="small" onFile={onFile}>
          {file ? effect.pickAnother : effect.pick}
        </PickButton>
        {file && (
          <span className="quiet">
            {file.name} <span className="mono faint">{bytes(file.size)}</span>
          </span>
        )}
      </span>
      {error && <p className="field-error">{error}</p>}
    </div>
  )
}

async function submit(
  of: { workflow_slug: string; version: number },
  fields: readonly FormField[],
  values: Values,
  files: TestFiles,
): Promise<JobIds> {
  const ids: Record<string, string> = {}
  for (const [name, file] of Object.entries(files)) ids[name] = await upload(file)
  const plain = fields.filter((field) => !isMedia(field))
  const body = { ...of, properties: propertiesOf(plain, values), files: ids }
  return await api.post<JobIds>("/api/admin/jobs", body)
}

async function upload(file: File): Promise<string> {
  const answer = await api.post<AdminUpload>("/api/admin/uploads", {
    filename: file.name.slice(0, 200) || "file",
    content_type: file.type,
    size: file.size,
  })
  const { method, url, headers } = answer.upload
  const allowed = Object.entries(headers).filter(([name]) => !/^(content-length|host)$/i.test(name))
  const response = await fetch(url, { method, headers: Object.fromEntries(allowed), body: file })
  if (!response.ok) throw new ApiError("store_refused", words.uploadFailed, response.status)
  return answer.file_id
}

const AGAIN_MS = 300
const ENDED = new Set(["completed", "failed", "cancelled"])

function Outcome({ id, warning }: { id: string; warning: string | null }) {
  const path = `/api/admin/jobs/${id}/details`
  const query = useQuery<JobDetails>(path, { query: { files: false } })
  useLive(id, query.reload)
  return (
    <div className="stack" aria-live="polite">
      <Loaded query={query} skeleton={<Skeleton height="220px" />}>
        {(job) => (
          <>
            <Panel
              title={ENDED.has(job.status) ? words.result1 : words.running}
              aside={<Status status={job.status} />}
            >
              <div className="workflow-outcome">
                {!ENDED.has(job.status) && (
                  <Progress
                    label={words.running}
                    value={job.progress?.percent == null ? null : job.progress.percent / 100}
                    withPercent
                  />
                )}
                {warning && job.status === "queued" && (
                  <p className="is-failed">
                    {words.noWorker}: {warning}
                  </p>
                )}
                {!warning && job.why && job.status === "queued" && <p className="quiet">{job.why}</p>}
                {job.error && <p className="is-failed">{job.error}</p>}
                <LinkButton size="small" href={`/console/jobs/${id}`}>
                  {words.seeJob}
                </LinkButton>
              </div>
            </Panel>
            <Files job={job} path={path} />
          </>
        )}
      </Loaded>
    </div>
  )
}

/** Reads the job again when the operators' events report a change. */
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
