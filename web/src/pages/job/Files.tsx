/** Shows a job's input and output files. A customer's pictures appear only on request, which is
 * audited. */

import { useState } from "react"
import { useQuery } from "@/api"
import type { FileSeen, JobDetails } from "@/api/schema"
import { Button, bytes, ErrorNote, LinkButton, Panel } from "@/ui"
import { words } from "@/words/en/job"

export function Files({ job, path }: { job: JobDetails; path: string }) {
  const isOwn = job.user_id === null
  const [isRequested, setRequested] = useState(false)
  const isShown = isOwn || isRequested
  // File URLs expire, so the files are requested again after each change of status.
  const seen = useQuery<JobDetails>(isShown ? path : null, { query: { files: true, of: job.status } })
  const shown = isShown ? seen.data : undefined
  const files = [
    ...(shown ?? job).inputs.map((file) => ({ file, side: words.input })),
    ...(shown ?? job).outputs.map((file) => ({ file, side: words.output })),
  ]
  const preview = shown?.progress?.preview
  return (
    <Panel
      className="job-files"
      title={words.inOut}
      aside={
        !isOwn &&
        files.length > 0 && (
          <Button size="small" aria-pressed={isRequested} onClick={() => setRequested(!isRequested)}>
            {isRequested ? words.hideFiles : words.showFiles}
          </Button>
        )
      }
    >
      {!isOwn && files.length > 0 && <p className="job-none">{words.showText}</p>}
      {seen.error && <ErrorNote error={seen.error} onRetry={seen.reload} />}
      {files.length === 0 && !preview && <p className="job-none">{words.noFiles}</p>}
      <div className="job-prints">
        {files.map(({ file, side }) => (
          <OneFile
            key={`${side} ${file.name} ${file.filename}`}
            file={file}
            side={side}
            isRequested={Boolean(shown)}
          />
        ))}
        {preview && (
          <figure>
            <div className="job-print">
              <img src={preview} alt={words.preview} />
            </div>
            <figcaption className="mono">{words.preview}</figcaption>
          </figure>
        )}
      </div>
      <Values title={words.properties} entries={Object.entries(job.properties)} />
      <Values title={words.values} entries={job.values.map((value) => [value.name, value.value])} />
    </Panel>
  )
}

function OneFile({ file, side, isRequested }: { file: FileSeen; side: string; isRequested: boolean }) {
  const kind = file.content_type?.split("/")[0]
  const name = `${side}: ${file.name}`
  return (
    <figure>
      <div className={file.url ? "job-print" : "job-print is-hidden"}>
        {file.url && kind === "image" && <img src={file.url} alt={name} loading="lazy" />}
        {/* biome-ignore lint/a11y/useMediaCaption: customers' files have no captions */}
        {file.url && kind === "video" && <video src={file.url} controls aria-label={name} />}
        {!file.url && <span>{isRequested || file.size === null ? words.gone : words.hidden}</span>}
      </div>
      <figcaption className="mono">
        <span>
          {name}
          {file.size !== null && ` · ${bytes(file.size)}`}
        </span>
        {file.url && (
          <LinkButton
            kind="ghost"
            size="small"
            icon="download"
            href={file.url}
            download={file.filename}
            label={words.download(file.filename)}
          />
        )}
      </figcaption>
    </figure>
  )
}

function Values({ title, entries }: { title: string; entries: readonly (readonly [string, unknown])[] }) {
  if (entries.length === 0) return null
  return (
    <dl className="job-values" aria-label={title}>
      {entries.map(([name, value]) => (
        <div key={name}>
          <dt className="mono">{name}</dt>
          <dd>{typeof value === "string" ? value : JSON.stringify(value)}</dd>
        </div>
      ))}
    </dl>
  )
}
