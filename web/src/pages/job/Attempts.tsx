import type { JobDetails } from "@/api/schema"
import { duration, Panel, Status, useNow } from "@/ui"
import { words } from "@/words/en/job"
import { axisOf, type Bar, type Line, stateOfOutcome } from "./axis"

export function Attempts({ job }: { job: JobDetails }) {
  const axis = axisOf(job, useNow())
  const time = duration(axis.seconds)
  return (
    <Panel
      className="job-attempts"
      title={
        <>
          {words.attempts}{" "}
          {axis.lines.length > 0 && <small>{job.completed_at ? words.took(time) : words.since(time)}</small>}
        </>
      }
      aside={axis.lines.length > 0 && <span className="mono">{words.axis(time)}</span>}
    >
      {axis.lines.length === 0 && <p className="job-none">{words.noAttempt}</p>}
      <ol>
        {axis.lines.map((line) => (
          <OneLine key={line.attempt.lease_number} line={line} />
        ))}
      </ol>
    </Panel>
  )
}

function OneLine({ line: { attempt, bars } }: { line: Line }) {
  const state = stateOfOutcome(attempt.outcome)
  return (
    <li>
      <div className="job-who">
        <b>{words.attempt(attempt.attempt)}</b>
        <span className="mono">{attempt.worker_id}</span>
      </div>
      <div className="job-axis">
        {bars.map((bar) => (
          <span
            key={bar.kind}
            className={`job-bar job-bar-${bar.kind} is-${state}`}
            style={{ left: `${bar.from * 100}%`, width: `${(bar.to - bar.from) * 100}%` }}
            title={barText(bar, attempt.outcome === null)}
          >
            <span>{barText(bar, attempt.outcome === null)}</span>
          </span>
        ))}
      </div>
      <p className="job-times narrow-only">
        {bars.map((bar) => barText(bar, attempt.outcome === null)).join(", ")}
      </p>
      <div className="job-outcome">
        <Status status={state}>
          {attempt.outcome === null ? words.goesOn : (words.outcomes[attempt.outcome] ?? attempt.outcome)}
        </Status>
      </div>
      {attempt.message && <p className="job-message">{attempt.message}</p>}
    </li>
  )
}

function barText(bar: Bar, goesOn: boolean): string {
  const time = duration(bar.seconds)
  if (bar.kind === "waited") return words.waited(time)
  if (bar.kind === "prepared") return words.prepared(time)
  return goesOn ? words.runs(time) : words.ran(time)
}
