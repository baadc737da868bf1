/** The contact sheet, with one section per step. Users judge candidates by keyboard or in the side
 * panel. */

import { type KeyboardEvent as ReactKeyboardEvent, useEffect, useMemo, useRef, useState } from "react"
import { useAct } from "@/api"
import type { PipelineRunAnswer, StepAnswer } from "@/api/schema"
import { Button, Choices, Empty, ErrorNote, Loaded, Select } from "@/ui"
import { words } from "@/words/en/pipelines"
import { bestFirst, type Candidate, fits, highestFirst, SHOWS, type Show } from "./candidates"
import { isForAnotherElement, useJudge, VERDICT_KEYS } from "./judge"
import { Drawn, judgeStatus, Picture } from "./Print"
import type { Book } from "./useRun"

type Order = keyof typeof words.grid.orders
const ORDERS = (Object.keys(words.grid.orders) as Order[]).map((value) => ({
  value,
  label: words.grid.orders[value],
}))
const SHOWN_FIRST = 60

interface GridProps {
  book: Book
  run: PipelineRunAnswer
  show: Show
  onShow: (show: Show) => void
  chosen: string | null
  onChoose: (id: string) => void
}

export function Grid({ book, run, show, onShow, chosen, onChoose }: GridProps) {
  const [order, setOrder] = useState<Order>("best")
  const more = useAct(book.more)
  const sheet = useRef<HTMLDivElement>(null)
  useJudgeKeys(sheet, book)
  const needsApproval = run.steps.some((step) => step.needs_approval)
  const hasJudge = run.steps.some((step) => step.judge !== null)
  const orders = ORDERS.filter((order) => order.value !== "score" || hasJudge)
  const options = SHOWS.filter((item) => item !== "judge" || needsApproval || show === "judge").map(
    (value) => ({
      value,
      label: words.grid.shows[value],
    }),
  )
  const shown = useMemo(
    () => book.all.filter((candidate) => fits(candidate, show, book.waiting)),
    [book.all, show, book.waiting],
  )
  return (
    <>
      <div className="pipeline-run-tools">
        <Choices label={words.grid.show} hideLabel options={options} value={show} onChange={onShow} />
        <Select label={words.grid.order} hideLabel options={orders} value={order} onChange={setOrder} />
        <Keys />
      </div>
      <Loaded query={book.list} skeleton={<Coming />}>
        {({ all, next }) => (
          <div ref={sheet}>
            {all.length > 0 && shown.length === 0 ? (
              <Empty
                title={words.grid.noneFits}
                act={<Button onClick={() => onShow("all")}>{words.grid.showAll}</Button>}
              >
                {words.grid.noneFitsText}
              </Empty>
            ) : (
              run.steps.map((step, number) => (
                <StepSheet
                  // biome-ignore lint/suspicious/noArrayIndexKey: the order of steps never changes
                  key={number}
                  step={step}
                  number={number}
                  isFiltered={show !== "all"}
                  candidates={ordered(shown, number, order)}
                  book={book}
                  chosen={chosen}
                  onChoose={onChoose}
                />
              ))
            )}
            {more.error && <ErrorNote error={more.error} />}
            {next !== null && (
              <Button busy={more.isRunning} onClick={() => void more.run()}>
                {words.grid.older}
              </Button>
            )}
          </div>
        )}
      </Loaded>
    </>
  )
}

function ordered(all: readonly Candidate[], step: number, order: Order): Candidate[] {
  const own = all.filter((candidate) => candidate.step === step)
  if (order === "best") return bestFirst(own)
  if (order === "score") return highestFirst(own)
  return order === "newest" ? own.reverse() : own
}

function Keys() {
  const { keys } = words.grid
  return (
    <span className="pipeline-run-keys faint wide-only">
      {(["a", "w", "x", "u"] as const).map((key) => (
        <span key={key}>
          <kbd>{key.toUpperCase()}</kbd> {keys[VERDICT_KEYS[key] ?? "undo"]}
        </span>
      ))}
    </span>
  )
}

interface StepSheetProps {
  step: StepAnswer
  number: number
  isFiltered: boolean
  candidates: readonly Candidate[]
  book: Book
  chosen: string | null
  onChoose: (id: string) => void
}

function StepSheet({ step, number, isFiltered, candidates, book, chosen, onChoose }: StepSheetProps) {
  const [most, setMost] = useState(SHOWN_FIRST)
  if (isFiltered && candidates.length === 0) return null
  const making = isFiltered ? 0 : step.in_flight - step.judging
  const rest = candidates.length - most
  return (
    <section className="pipeline-run-step">
      <h2>
        {step.name} <span className="faint">{progressText(step)}</span>
      </h2>
      {candidates.length === 0 && making === 0 && number === 0 && (
        <Empty title={words.grid.none}>{words.grid.noneText}</Empty>
      )}
      <ul className="pipeline-run-sheet" onKeyDown={moveFocus}>
        {candidates.slice(0, most).map((candidate) => (
          <One
            key={candidate.id}
            candidate={candidate}
            book={book}
            isChosen={candidate.id === chosen}
            onChoose={onChoose}
          />
        ))}
        {Array.from({ length: making }, (_, index) => (
          // biome-ignore lint/suspicious/noArrayIndexKey: the placeholders are interchangeable
          <li key={index} className="pipeline-run-one">
            <span className="pipeline-run-frame">{words.grid.beingMade}</span>
          </li>
        ))}
      </ul>
      {rest > 0 && <Button onClick={() => setMost(candidates.length)}>{words.grid.more(rest)}</Button>}
    </section>
  )
}

function progressText(step: StepAnswer): string {
  const parts = [words.grid.made(step.made, step.wanted)]
  const { judge, judging, unjudged } = step
  if (step.in_flight > judging) parts.push(words.grid.inFlight(step.in_flight - judging))
  if (step.failed > 0) parts.push(words.grid.failed(step.failed))
  if (unjudged > 0) parts.push(words.judge.left(unjudged))
  const text = parts.join(", ")
  return judge ? `${text}; ${words.judge.step(judge.name, judge.approve_above, judge.reject_below)}` : text
}

interface OneProps {
  candidate: Candidate
  book: Book
  isChosen: boolean
  onChoose: (id: string) => void
}

function One({ candidate, book, isChosen, onChoose }: OneProps) {
  const { id, status, score, judge_score: judgeScore } = candidate
  const label = book.labels.get(id) ?? ""
  const isWaiting = book.waiting.has(id)
  const judged = judgeStatus(candidate, book.run.data?.steps ?? [])
  const isPersons = candidate.judged_by !== "judge" && status !== "active"
  const word = isWaiting ? words.toJudge : isPersons ? words.statuses[status] : ""
  const ariaText = words.grid.told(
    label,
    [judged, word].filter(Boolean).join(", ") || words.statuses.active,
    score,
  )
  const scoreText = judgeScore === null ? "" : words.judge.score(judgeScore)
  return (
    <li className={`pipeline-run-one is-${status}-one${isWaiting ? " is-asking" : ""}`} data-candidate={id}>
      <button
        type="button"
        className="pipeline-run-print print"
        aria-pressed={isChosen}
        aria-label={scoreText ? `${ariaText}, ${words.judge.told(scoreText)}` : ariaText}
        onClick={() => onChoose(id)}
      >
        <Picture candidate={candidate} book={book} alt="" />
      </button>
      <Drawn candidate={candidate} />
      {judged && (
        <span className="pipeline-run-judged" aria-hidden="true">
          {judged}
        </span>
      )}
      <span className="pipeline-run-caption" aria-hidden="true">
        <b className="mono">{label}</b>
        <span className="cut-text">{word}</span>
        <span className={scoreText ? "mono" : "mono faint"}>{scoreText || words.grid.score(score)}</span>
      </span>
    </li>
  )
}

function moveFocus(event: ReactKeyboardEvent<HTMLElement>): void {
  const here = (event.target as HTMLElement).closest<HTMLElement>("button")
  const all = [...event.currentTarget.querySelectorAll<HTMLElement>("button")]
  const at = here ? all.indexOf(here) : -1
  const row = here?.getBoundingClientRect()
  if (at < 0 || !row) return
  const columns = Math.max(
    1,
    all.filter((item) => Math.abs(item.getBoundingClientRect().top - row.top) < 4).length,
  )
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key]
  const next = step === undefined ? undefined : all[at + step]
  if (!next) return
  event.preventDefault()
  next.focus()
}

/** The keys A, W, X and U judge the focused candidate, or else the one under the pointer. */
export function useJudgeKeys(area: { current: HTMLElement | null }, book: Book): void {
  const judge = useJudge(book)
  useEffect(() => {
    const handle = (event: KeyboardEvent) => {
      const verdict = VERDICT_KEYS[event.key.toLowerCase()]
      if (!verdict || isForAnotherElement(event)) return
      const focused = (event.target as HTMLElement).closest?.<HTMLElement>("[data-candidate]")
      const pointed = area.current?.querySelector<HTMLElement>("[data-candidate]:hover")
      const id = (focused ?? pointed)?.dataset.candidate
      if (id) judge(id, verdict)
    }
    window.addEventListener("keydown", handle)
    return () => window.removeEventListener("keydown", handle)
  }, [area, judge])
}

function Coming() {
  return (
    <ul className="pipeline-run-sheet">
      {["a", "b", "c", "d", "e", "f"].map((key) => (
        <li key={key} className="pipeline-run-one">
          <span className="pipeline-run-print print" />
          <span className="pipeline-run-caption" />
        </li>
      ))}
    </ul>
  )
}
