import type { EntryAnswer, JobDetails } from "@/api/schema"
import { exactTime, Panel, shortId } from "@/ui"
import { words } from "@/words/en/job"

const BAD = new Set(["fail", "expire"])
const BUSY = new Set(["lease", "start"])

export function History({ job }: { job: JobDetails }) {
  return (
    <Panel
      className="job-history"
      title={words.history}
      aside={<span className="mono">{words.events(job.audit.length)}</span>}
    >
      {job.audit.length === 0 && <p className="job-none">{words.noAudit}</p>}
      <ol>
        {job.audit.map((entry) => (
          <li key={entry.id} className={kindOf(entry.action)}>
            <time dateTime={entry.at} title={exactTime(new Date(entry.at))} className="mono">
              {clock(entry.at)}
            </time>
            <i aria-hidden="true" />
            <b>{actionWord(entry.action)}</b>
            <span>{[words.by(shortActor(entry.actor)), factsOf(entry)].filter(Boolean).join(", ")}</span>
          </li>
        ))}
      </ol>
    </Panel>
  )
}

function kindOf(action: string): string {
  if (BAD.has(action)) return "is-failed"
  return BUSY.has(action) ? "is-running" : "is-plain"
}

export function actionWord(action: string): string {
  return words.actions[action] ?? action.replaceAll("_", " ")
}

/** Formats a time to the millisecond, in the user's time zone. */
export function clock(at: string): string {
  const moment = new Date(at)
  const padded = (value: number, digits = 2) => String(value).padStart(digits, "0")
  return `${padded(moment.getHours())}:${padded(moment.getMinutes())}:${padded(moment.getSeconds())}.${padded(moment.getMilliseconds(), 3)}`
}

/** Shortens an actor to a form such as tenant:0b783b2d or worker:gpu-7. */
function shortActor(actor: string): string {
  const [kind, id] = actor.split(":", 2)
  return id === undefined ? actor : `${kind} ${shortId(id)}`
}

function factsOf({ details }: EntryAnswer): string {
  return Object.entries(details)
    .filter(([, value]) => ["string", "number", "boolean"].includes(typeof value) && value !== 0)
    .slice(0, 4)
    .map(([name, value]) => `${name.replaceAll("_", " ")} ${String(value).slice(0, 120)}`)
    .join(", ")
}
