/** The panel for one candidate next to the sheet or the tree: its judgment, inputs and
 * ancestors. */

import { useEffect, useState } from "react"
import { useQuery } from "@/api"
import type { CandidateAnswer, LineageAnswer, PipelineRunAnswer } from "@/api/schema"
import { Button, CopyId, LinkButton, Status, Time } from "@/ui"
import { words } from "@/words/en/pipelines"
import { type Candidate, factsOf, lineageOf, promptOf } from "./candidates"
import { useJudge } from "./judge"
import { Large } from "./Large"
import { Picture } from "./Print"
import type { Book } from "./useRun"

interface SideProps {
  candidate: Candidate
  book: Book
  run: PipelineRunAnswer
  onChoose: (id: string) => void
  onClose: () => void
}

export function Side({ candidate, book, run, onChoose, onClose }: SideProps) {
  const label = book.labels.get(candidate.id) ?? ""
  const [isLarge, setLarge] = useState(false)
  useEffect(() => {
    const handle = (event: KeyboardEvent) => {
      if (event.key !== "Escape" || (event.target as HTMLElement).closest?.("dialog, [role=menu]")) return
      onClose()
    }
    window.addEventListener("keydown", handle)
    return () => window.removeEventListener("keydown", handle)
  }, [onClose])
  return (
    <aside className="pipeline-run-side" aria-label={words.side.label(label)} data-candidate={candidate.id}>
      <header className="pipeline-run-side-head">
        <h2 className="mono">{label}</h2>
        <Verdict candidate={candidate} step={run.steps[candidate.step]?.name ?? ""} book={book} />
        <Button kind="ghost" size="small" icon="cross" label={words.side.close} onClick={onClose} />
      </header>
      <button
        type="button"
        className="pipeline-run-large"
        title={words.side.large}
        aria-label={`${words.side.large}: ${words.side.label(label)}`}
        onClick={() => setLarge(true)}
      >
        <Picture candidate={candidate} book={book} alt="" eager />
      </button>
      {isLarge && (
        <Large
          candidates={[candidate]}
          at={0}
          onMove={() => undefined}
          onClose={() => setLarge(false)}
          book={book}
        />
      )}
      <Acts candidate={candidate} book={book} />
      <Facts candidate={candidate} book={book} run={run} onChoose={onChoose} />
    </aside>
  )
}

function Verdict({ candidate, step, book }: { candidate: Candidate; step: string; book: Book }) {
  const { status, judged_by } = candidate
  if (status === "winner")
    return (
      <Status status="succeeded" pill>
        {words.winnerOf(step)}
      </Status>
    )
  const verdict = (judged_by === "judge" && words.judge.verdicts[status]) || words.statuses[status]
  if (status === "approved")
    return (
      <Status status="succeeded" pill>
        {verdict}
      </Status>
    )
  if (status === "rejected")
    return (
      <Status status="cancelled" pill>
        {verdict}
      </Status>
    )
  if (book.waiting.has(candidate.id)) return <Status status="waiting" pill />
  return <span className="faint">{words.statuses.active}</span>
}

function Acts({ candidate, book }: { candidate: Candidate; book: Book }) {
  const judge = useJudge(book)
  const { id, status, url, path } = candidate
  return (
    <div className="pipeline-run-acts">
      <Button
        size="small"
        icon="tick"
        kind={book.waiting.has(id) ? "go" : "plain"}
        aria-pressed={status === "approved"}
        onClick={() => judge(id, "approve")}
      >
        {words.side.approve}
      </Button>
      <Button size="small" icon="edit" aria-pressed={status === "winner"} onClick={() => judge(id, "winner")}>
        {words.side.winner}
      </Button>
      <Button
        size="small"
        icon="cross"
        aria-pressed={status === "rejected"}
        onClick={() => judge(id, "reject")}
      >
        {words.side.reject}
      </Button>
      {status !== "active" && (
        <Button size="small" icon="undo" label={words.side.undo} onClick={() => judge(id, "undo")} />
      )}
      {url && (
        <LinkButton
          size="small"
          icon="download"
          href={url}
          download={path.split("/").at(-1) ?? true}
          label={words.side.download}
        />
      )}
    </div>
  )
}

interface FactsProps {
  candidate: Candidate
  book: Book
  run: PipelineRunAnswer
  onChoose: (id: string) => void
}

function Facts({ candidate, book, run, onChoose }: FactsProps) {
  const lineage = useQuery<LineageAnswer>(`${book.path}/candidates/${candidate.id}/lineage`)
  const { won, lost, tied } = lineage.data ?? {}
  const { judge_score: judgeScore, judge_error: judgeError } = candidate
  const scores = [
    [won, words.side.won],
    [lost, words.side.lost],
    [tied, words.side.tied(tied ?? 0)],
    [Math.round(candidate.score), words.side.rating],
    ...(judgeScore === null ? [] : [[words.judge.score(judgeScore), words.side.score] as const]),
  ] as const
  const { properties, seed_text: seed, text, url } = candidate
  return (
    <>
      <ul className="pipeline-run-scores">
        {scores.map(([value, word]) => (
          <li key={word}>
            <b>{value ?? "…"}</b> <span className="faint">{word}</span>
          </li>
        ))}
      </ul>
      <dl className="pipeline-run-facts">
        <dt>{words.side.prompt}</dt>
        <dd>{promptOf(properties) ?? <span className="faint">{words.side.noPrompt}</span>}</dd>
        {seed && (
          <>
            <dt>{words.side.seed}</dt>
            <dd>
              <CopyId id={seed} whole />
            </dd>
          </>
        )}
        {factsOf(properties, words.side.file).map(([name, value]) => (
          <Fact key={name} name={name} value={value} />
        ))}
        {text !== null && url !== null && <Fact name={words.side.text} value={text} />}
        {judgeError !== null && <Fact name={words.side.judge} value={judgeError} />}
        {candidate.job_id && (
          <>
            <dt>{words.side.job}</dt>
            <dd>
              <CopyId id={candidate.job_id} />
            </dd>
          </>
        )}
        <dt>{words.side.made}</dt>
        <dd>
          <Time at={candidate.created_at} />
        </dd>
      </dl>
      <Family candidate={candidate} book={book} run={run} onChoose={onChoose} lineage={lineage.data} />
    </>
  )
}

function Fact({ name, value }: { name: string; value: string }) {
  return (
    <>
      <dt className="pipeline-run-fact">{name}</dt>
      <dd>{value}</dd>
    </>
  )
}

function Family({
  candidate,
  book,
  run,
  onChoose,
  lineage,
}: FactsProps & { lineage: LineageAnswer | undefined }) {
  // Ancestors that the page already has are shown immediately. The others appear once the lineage
  // has loaded.
  const knownLineage = lineageOf(candidate.id, book.byId)
  const whole: readonly CandidateAnswer[] = lineage?.candidates ?? knownLineage
  const line = whole.map((ancestor) => book.byId.get(ancestor.id) ?? { ...ancestor, urlAt: 0 })
  const children = book.all.filter((child) => child.parent === candidate.id)
  return (
    <>
      <Relatives
        title={words.side.from}
        candidates={line}
        of={candidate.id}
        book={book}
        run={run}
        onChoose={onChoose}
      />
      {children.length > 0 && (
        <Relatives
          title={words.side.children}
          candidates={children}
          of=""
          book={book}
          run={run}
          onChoose={onChoose}
        />
      )}
    </>
  )
}

interface RelativesProps {
  title: string
  candidates: readonly Candidate[]
  of: string
  book: Book
  run: PipelineRunAnswer
  onChoose: (id: string) => void
}

function Relatives({ title, candidates, of, book, run, onChoose }: RelativesProps) {
  return (
    <section className="pipeline-run-family">
      <h3>{title}</h3>
      <ol>
        {candidates.map((candidate) => (
          <li key={candidate.id}>
            <button
              type="button"
              aria-current={candidate.id === of || undefined}
              onClick={() => onChoose(candidate.id)}
            >
              <span className="print">
                <Picture candidate={candidate} book={book} alt="" />
              </span>
              <span className="pipeline-run-family-text">
                <b className="mono">{book.labels.get(candidate.id) ?? `${candidate.step + 1}·`}</b>
                <span className="faint">{run.steps[candidate.step]?.name}</span>
                <span className="cut-text">{promptOf(candidate.properties)}</span>
                {candidate.seed_text && (
                  <span className="mono faint">{words.vote.seed(candidate.seed_text)}</span>
                )}
              </span>
            </button>
          </li>
        ))}
      </ol>
    </section>
  )
}
