/** Shows a node's executions with their inputs, outputs, attempts and times. */

import { type ReactNode, useState } from "react"
import { Link } from "wouter"
import type { ExecutionSeen } from "@/api/schema"
import { Button, CopyId, duration, Select, Status, Time } from "@/ui"
import { JsonTree } from "@/ui/JsonTree"
import { words } from "@/words/en/canvas"
import { backendName, filesIn, tookSeconds } from "./follow"

interface ExecutionPanelProps {
  id: string
  executions: readonly ExecutionSeen[]
  onClose: () => void
  /** Buttons for actions on the node. */
  children?: ReactNode
}

export function ExecutionPanel({ id, executions, onClose, children }: ExecutionPanelProps) {
  const [at, setAt] = useState(0)
  const one = executions[Math.min(at, executions.length - 1)]
  return (
    <aside className="canvas-side canvas-panel" aria-label={words.execution(id)}>
      <div className="row">
        <h2 className="cut-text">{id}</h2>
        <Button
          kind="ghost"
          size="small"
          icon="cross"
          label={words.closePanel}
          className="row-end"
          onClick={onClose}
        />
      </div>
      {executions.length > 1 && (
        <Select
          label={words.items}
          options={executions.map((execution, place) => ({ value: String(place), label: nameOf(execution) }))}
          value={String(at)}
          onChange={(value) => setAt(Number(value))}
        />
      )}
      {one ? <Facts execution={one} /> : <p className="faint">{words.nodeStatuses.pending}</p>}
      {children}
    </aside>
  )
}

/** Returns the name of an execution. Inner nodes of a map or a loop appear with their own names. */
function nameOf({ node, index, status }: ExecutionSeen): string {
  const inner = node.includes("/") ? node.slice(node.indexOf("/") + 1) : ""
  const item = index.length > 0 ? words.item(index) : inner ? "" : words.whole
  return `${[inner, item].filter(Boolean).join(", ")}, ${words.nodeStatuses[status] ?? status}`
}

function statusOf(status: string): string {
  return status === "done" ? "succeeded" : status
}

function Facts({ execution }: { execution: ExecutionSeen }) {
  const { status, error, why, notes, inputs, outputs, has_values } = execution
  return (
    <>
      <Status status={statusOf(status)}>{words.nodeStatuses[status] ?? status}</Status>
      {why && <p>{why}</p>}
      {error && <p className="field-error">{error}</p>}
      {filesIn(outputs).map((file) => (
        <a key={file.file_id} href={file.url} className="canvas-result" target="_blank" rel="noreferrer">
          {file.mime_type.startsWith("image/") ? <img src={file.url} alt={file.filename} /> : file.filename}
        </a>
      ))}
      {!has_values && <p className="faint">{words.noValues}</p>}
      {inputs && <Values title={words.inputs} value={inputs} />}
      {outputs && <Values title={words.outputsOf} value={outputs} />}
      {notes.length > 0 && <Values title={words.notes} value={notes} />}
      <Times execution={execution} />
    </>
  )
}

function Values({ title, value }: { title: string; value: unknown }) {
  return (
    <details className="canvas-more">
      <summary>{title}</summary>
      <JsonTree value={value} openLevels={2} />
    </details>
  )
}

function Times({ execution }: { execution: ExecutionSeen }) {
  const { attempts, queued_at, started_at, ended_at, backend, job_id, current_step, reused_from } = execution
  return (
    <dl className="canvas-facts">
      {attempts > 0 && (
        <>
          <dt>{words.attempt}</dt>
          <dd>{attempts}</dd>
        </>
      )}
      {queued_at && (
        <>
          <dt>{words.queuedAt}</dt>
          <dd>
            <Time at={queued_at} />
          </dd>
        </>
      )}
      {started_at && queued_at && (
        <>
          <dt>{words.waited}</dt>
          <dd>{duration(tookSeconds(queued_at, started_at))}</dd>
        </>
      )}
      {started_at && ended_at && (
        <>
          <dt>{words.took}</dt>
          <dd>{duration(tookSeconds(started_at, ended_at))}</dd>
        </>
      )}
      {current_step && !ended_at && (
        <>
          <dt>{words.step}</dt>
          <dd>{current_step}</dd>
        </>
      )}
      {backend && (
        <>
          <dt>{words.backend}</dt>
          <dd>{backendName(backend)}</dd>
        </>
      )}
      {reused_from?.run_id && (
        <>
          <dt>{words.takenFrom}</dt>
          <dd>
            <Link href={`/graph-runs/${reused_from.run_id}`}>{words.earlierResult}</Link>
          </dd>
        </>
      )}
      {job_id && (
        <>
          <dt>{words.job}</dt>
          <dd>
            <CopyId id={job_id} />
          </dd>
        </>
      )}
    </dl>
  )
}
