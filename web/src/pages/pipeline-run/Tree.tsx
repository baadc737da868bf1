/** The tree of candidates, with steps from left to right. The lineage of the selected candidate is
 * highlighted. */

import { useMemo, useRef, useState } from "react"
import type { PipelineRunAnswer } from "@/api/schema"
import { Button, Empty, Loaded, Skeleton, tokens } from "@/ui"
import { words } from "@/words/en/pipelines"
import { lineageOf } from "./candidates"
import { useJudgeKeys } from "./Grid"
import { Drawn, judgeStatus, Picture } from "./Print"
import { CELL, columnOf, type Layout, layout, line, neighborOf, type Place } from "./tree"
import type { Book } from "./useRun"

interface TreeProps {
  book: Book
  run: PipelineRunAnswer
  chosen: string | null
  onChoose: (id: string) => void
}

const START_WIDTH = 150

export function Tree(props: TreeProps) {
  return (
    <Loaded query={props.book.list} skeleton={<Skeleton height="60vh" />}>
      {({ all }) =>
        all.length > 0 ? <Board {...props} /> : <Empty title={words.grid.none}>{words.grid.noneText}</Empty>
      }
    </Loaded>
  )
}

function Board({ book, run, chosen, onChoose }: TreeProps) {
  const [whole, setWhole] = useState<ReadonlySet<number>>(new Set())
  const board = useRef<HTMLDivElement>(null)
  useJudgeKeys(board, book)
  const placed = useMemo(
    () => layout(book.all, run.steps.length, whole, chosen),
    [book.all, run.steps.length, whole, chosen],
  )
  // If nothing is selected, the winner's lineage is highlighted.
  const winner = book.all.findLast((candidate) => candidate.status === "winner")
  const inInk = new Set(lineageOf(chosen ?? winner?.id ?? null, book.byId).map((candidate) => candidate.id))
  const hiddenOf = (step: number) => placed.rests.find((rest) => rest.step === step)?.hidden ?? 0
  const toggle = (step: number) =>
    setWhole(
      (before) =>
        new Set(before.has(step) ? [...before].filter((other) => other !== step) : [...before, step]),
    )
  return (
    // biome-ignore lint/a11y/noNoninteractiveTabindex: keyboard users must be able to scroll it
    <section ref={board} className="pipeline-run-board" tabIndex={0} aria-label={words.tree.board}>
      <div className="pipeline-run-columns" style={{ width: placed.width }}>
        <span style={{ left: 0 }}>
          <b>{words.tree.start}</b>
        </span>
        {run.steps.map((step, number) => (
          <span key={step.name} style={{ left: columnOf(number) }}>
            <b>{step.name}</b> <span className="faint">{countText(step.made, hiddenOf(number))}</span>
            {whole.has(number) && (
              <button type="button" className="link" onClick={() => toggle(number)}>
                {words.tree.fewer}
              </button>
            )}
          </span>
        ))}
      </div>
      {/* biome-ignore lint/a11y/noStaticElementInteractions: arrow keys move between the
          buttons inside */}
      <div
        className="pipeline-run-plane"
        style={{ width: placed.width, height: placed.height }}
        onKeyDown={(event) => {
          const from = (event.target as HTMLElement).closest<HTMLElement>("[data-candidate]")?.dataset
            .candidate
          const next = from && neighborOf(placed.places, from, event.key)
          if (!next) return
          event.preventDefault()
          board.current?.querySelector<HTMLElement>(`[data-candidate="${next}"] button`)?.focus()
        }}
      >
        <Lines placed={placed} inInk={inInk} />
        <RunInputs run={run} top={placed.start} />
        {placed.places.map((place) => (
          <Node
            key={place.candidate.id}
            place={place}
            book={book}
            isChosen={place.candidate.id === chosen}
            onChoose={onChoose}
          />
        ))}
        {placed.rests.map((rest) => (
          <div key={rest.step} className="pipeline-run-rest" style={{ left: rest.x, top: rest.y }}>
            <Button size="small" onClick={() => toggle(rest.step)}>
              {words.tree.rest(rest.hidden)}
            </Button>
          </div>
        ))}
      </div>
    </section>
  )
}

function countText(count: number, hidden: number): string {
  return hidden > 0 ? words.tree.best(count - hidden, count) : words.tree.made(count)
}

function Lines({ placed, inInk }: { placed: Layout; inInk: ReadonlySet<string> }) {
  const byId = new Map(placed.places.map((place) => [place.candidate.id, place]))
  const middle = CELL.height / 2
  const lines = placed.places.map(({ candidate, x, y }) => {
    const parent = candidate.parent === null ? undefined : byId.get(candidate.parent)
    const fromX = parent ? parent.x + CELL.width + 8 : START_WIDTH + 8
    const fromY = (parent?.y ?? placed.start) + middle
    return { id: candidate.id, path: line(fromX, fromY, x - 8, y + middle), isInk: inInk.has(candidate.id) }
  })
  const sorted = lines.sort((one, other) => Number(one.isInk) - Number(other.isInk))
  return (
    <svg width={placed.width} height={placed.height} aria-hidden="true">
      {sorted.map((edge) => (
        <path key={edge.id} d={edge.path} className={edge.isInk ? "is-ink" : undefined} />
      ))}
    </svg>
  )
}

function RunInputs({ run, top }: { run: PipelineRunAnswer; top: number }) {
  const variables = Object.entries(run.variables)
  return (
    <div className="pipeline-run-brief" style={{ top, width: START_WIDTH }}>
      <b>{words.tree.brief}</b>
      {variables.length === 0 && <p className="faint">{words.tree.noVariables}</p>}
      {variables.slice(0, 3).map(([name, value]) => (
        <p key={name} className="cut-text" title={String(value)}>
          <span className="faint">{name}</span> {String(value)}
        </p>
      ))}
      <span className="mono faint">{words.tree.tokens(tokens(run.tokens))}</span>
    </div>
  )
}

interface NodeProps {
  place: Place
  book: Book
  isChosen: boolean
  onChoose: (id: string) => void
}

function Node({ place: { candidate, x, y }, book, isChosen, onChoose }: NodeProps) {
  const label = book.labels.get(candidate.id) ?? ""
  const isWaiting = book.waiting.has(candidate.id)
  const judged = judgeStatus(candidate, book.run.data?.steps ?? [])
  const word = judged || (isWaiting ? words.toJudge : words.statuses[candidate.status])
  return (
    <div
      className={`pipeline-run-node is-${candidate.status}-one${isWaiting ? " is-asking" : ""}`}
      style={{ left: x, top: y, width: CELL.width }}
      data-candidate={candidate.id}
    >
      <button
        type="button"
        className="print pipeline-run-print"
        aria-pressed={isChosen}
        aria-label={words.grid.told(label, word, candidate.score)}
        onClick={() => onChoose(candidate.id)}
      >
        <Picture candidate={candidate} book={book} alt="" />
      </button>
      <Drawn candidate={candidate} />
      <span className="mono" aria-hidden="true">
        {label} {isWaiting && words.toJudge}
        {!isWaiting && candidate.judge_score !== null && words.judge.score(candidate.judge_score)}
      </span>
    </div>
  )
}
