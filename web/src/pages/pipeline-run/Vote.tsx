/** Shows two candidates next to each other. An arrow key picks the better one, and the next pair
 * appears. */

import { useCallback, useEffect, useRef, useState, useSyncExternalStore } from "react"
import { type ApiError, api, asApiError } from "@/api"
import type { PairAnswer, PipelineRunAnswer, VoteAnswer } from "@/api/schema"
import { Button, Empty, ErrorNote, LinkButton, Pencil, Progress, Select, Skeleton } from "@/ui"
import { words } from "@/words/en/pipelines"
import { type Candidate, isPicture, promptOf } from "./candidates"
import { isForAnotherElement, sendVerdict } from "./judge"
import { Large } from "./Large"
import { Picture } from "./Print"
import type { Book } from "./useRun"

type Side = "left" | "right"
type Choice = Side | "tie" | "skip" | "reject"

interface Pair {
  answer: PairAnswer
  candidates: readonly Candidate[]
  /** Each picture's width divided by its height, known before the picture is shown. */
  ratios: readonly number[]
}

interface Done {
  choice: Choice
  pair: Pair
  voteId: string | null
}

const LOOP_MS = 220
const SETTLED_MS = 1_500
const PICTURE_MS_MAX = 2_000
const SKIPPED_MAX = 20
const USUAL_RATIO = 0.8
/** A ratio of width to height. On a phone, narrower pictures are shown side by side, where users
 * swipe between them, and wider pictures are stacked. */
const TALL_RATIO = 0.85
const STACKED = { left: "upper", right: "lower" } as const
const NARROW = window.matchMedia("(max-width: 700px)")
const KEYS: Record<string, Choice> = {
  ArrowLeft: "left",
  ArrowRight: "right",
  "=": "tie",
  ArrowDown: "skip",
  x: "reject",
}

export function Vote({ book, run, best }: { book: Book; run: PipelineRunAnswer; best: string }) {
  const [step, setStep] = useState("")
  const jury = useJury(book, step)
  const [isGoingOn, setGoingOn] = useState(false)
  const [large, setLarge] = useState<number | null>(null)
  useKeys(jury.choose, jury.undo, () => setLarge(0))
  const { pair } = jury
  const isPair = pair !== null && pair.candidates.length === 2
  const isNarrow = useSyncExternalStore(watchNarrow, () => NARROW.matches)
  const isTall = pair?.ratios.every((ratio) => ratio <= TALL_RATIO) ?? false
  const sides = useRef<HTMLElement>(null)
  // Scrolls back to the first picture for each new pair.
  // biome-ignore lint/correctness/useExhaustiveDependencies: runs for each pair
  useEffect(() => {
    sides.current?.scrollTo({ left: 0 })
  }, [pair])
  const isEnough = isPair && pair.answer.votes >= pair.answer.votes_enough && !isGoingOn
  const steps = run.steps.map((item, number) => ({ value: String(number), label: item.name }))
  return (
    <div className="pipeline-run-vote">
      <div className="pipeline-run-question">
        <strong>{words.vote.question}</strong>
        <span className="faint cut-text">{isPair && sharedPrompt(pair)}</span>
        {steps.length > 1 && (
          <Select
            label={words.vote.step}
            hideLabel
            options={[{ value: "", label: words.vote.anyStep }, ...steps]}
            value={step}
            onChange={(value) => {
              setGoingOn(false)
              setStep(value)
            }}
          />
        )}
        {isPair && (
          <span className="pipeline-run-given">
            <span className="mono faint">
              {words.vote.given(pair.answer.votes, pair.answer.votes_enough)}
            </span>
            <Progress
              label={words.vote.progress}
              value={pair.answer.votes / Math.max(1, pair.answer.votes_enough)}
              state="ink"
            />
          </span>
        )}
      </div>
      {jury.error && <ErrorNote error={jury.error} onRetry={jury.reload} />}
      {pair === null && !jury.error && (
        <div className="pipeline-run-coming" aria-busy="true">
          <Skeleton height="100%" />
          <Skeleton height="100%" />
        </div>
      )}
      {pair !== null && !isPair && <Empty title={words.vote.none}>{words.vote.noneText}</Empty>}
      {isEnough && (
        <Empty
          title={words.vote.enough}
          act={
            <>
              <LinkButton kind="go" href={best}>
                {words.vote.seeBest}
              </LinkButton>
              <Button onClick={() => setGoingOn(true)}>{words.vote.goOn}</Button>
            </>
          }
        >
          {words.vote.enoughText}
        </Empty>
      )}
      {isPair && !isEnough && (
        <section
          ref={sides}
          className={isTall ? "pipeline-run-pair is-tall" : "pipeline-run-pair"}
          aria-label={words.vote.pair}
        >
          {(["left", "right"] as const).map((side, index) => (
            <Option
              key={side}
              side={side}
              place={isNarrow && !isTall ? STACKED[side] : side}
              candidate={pair.candidates[index]}
              ratio={pair.ratios[index] ?? USUAL_RATIO}
              isPicked={jury.picked === side || jury.picked === "tie"}
              isRejected={jury.picked === "reject"}
              book={book}
              onChoose={() => jury.choose(side)}
            />
          ))}
        </section>
      )}
      <Acts jury={jury} book={book} isOff={!isPair || isEnough} onLarge={() => setLarge(0)} />
      {isPair && large !== null && (
        <Large
          candidates={pair.candidates}
          at={large}
          onMove={setLarge}
          onClose={() => setLarge(null)}
          onChoose={(at) => {
            setLarge(null)
            jury.choose(at === 0 ? "left" : "right")
          }}
          book={book}
        />
      )}
    </div>
  )
}

function watchNarrow(listener: () => void): () => void {
  NARROW.addEventListener("change", listener)
  return () => NARROW.removeEventListener("change", listener)
}

/** Returns the prompt if both candidates share it. */
function sharedPrompt({ candidates: [one, other] }: Pair): string {
  const prompt = one ? promptOf(one.properties) : null
  return prompt && other && promptOf(other.properties) === prompt ? `“${prompt}”` : ""
}

interface OptionProps {
  side: Side
  /** The candidate's position on the screen. */
  place: Side | "upper" | "lower"
  candidate: Candidate | undefined
  ratio: number
  isPicked: boolean
  isRejected: boolean
  book: Book
  onChoose: () => void
}

function Option({ side, place, candidate, ratio, isPicked, isRejected, book, onChoose }: OptionProps) {
  if (!candidate) return null
  const label = book.labels.get(candidate.id) ?? ""
  return (
    <div className={isPicked ? "pipeline-run-option is-picked" : "pipeline-run-option"}>
      <div className="pipeline-run-cell" style={{ "--ratio": ratio } as Record<string, number>}>
        <button
          type="button"
          className="print"
          aria-label={words.vote.choose(label, words.vote[place])}
          onClick={({ currentTarget }) => (isWhole(currentTarget) ? onChoose() : scrollTo(currentTarget))}
        >
          <Picture candidate={candidate} book={book} alt="" eager />
          {isPicked && <Pencil kind="frame" />}
          {isRejected && <Pencil kind="cross" />}
        </button>
        <div className="pipeline-run-option-text">
          <kbd>{side === "left" ? "←" : "→"}</kbd>
          <b className="mono">{label}</b>
          {candidate.seed_text && (
            <span className="mono faint cut-text">{words.vote.seed(candidate.seed_text)}</span>
          )}
        </div>
      </div>
    </div>
  )
}

const CUT_MAX = 16

/** Checks whether an option is fully visible. A picture must not be chosen if only its edge is
 * visible. */
function isWhole(option: HTMLElement): boolean {
  const { left, right } = option.getBoundingClientRect()
  return left >= -CUT_MAX && right <= window.innerWidth + CUT_MAX
}

function scrollTo(option: HTMLElement): void {
  option.scrollIntoView({ inline: "center", block: "nearest", behavior: "smooth" })
}

interface ActsProps {
  jury: Jury
  book: Book
  isOff: boolean
  onLarge: () => void
}

function Acts({ jury, book, isOff, onLarge }: ActsProps) {
  const off = isOff && words.vote.none
  const last = jury.last
  return (
    <div className="pipeline-run-vote-acts" role="toolbar" aria-label={words.vote.acts}>
      <Button offReason={off} onClick={() => jury.choose("tie")}>
        <kbd>=</kbd> {words.vote.tie}
      </Button>
      <Button offReason={off} onClick={() => jury.choose("skip")}>
        <kbd>↓</kbd> {words.vote.skip}
      </Button>
      <Button offReason={!last && words.vote.nothingToUndo} onClick={jury.undo}>
        <kbd>U</kbd> {words.vote.undo}{" "}
        {last && <span className="mono faint wide-only">{choiceText(last, book)}</span>}
      </Button>
      <i aria-hidden="true" />
      <Button offReason={off} onClick={() => jury.choose("reject")}>
        <kbd>X</kbd> {words.vote.reject}
      </Button>
      <Button kind="ghost" offReason={off} onClick={onLarge}>
        <kbd>Space</kbd> {words.vote.large}
      </Button>
    </div>
  )
}

function choiceText({ choice, pair }: Done, book: Book): string {
  const [one = "", other = ""] = pair.candidates.map((candidate) => book.labels.get(candidate.id) ?? "")
  if (choice === "tie") return words.vote.tied(one, other)
  if (choice === "skip") return words.vote.skipped(one, other)
  if (choice === "reject") return words.vote.rejected(one, other)
  return choice === "left" ? words.vote.over(one, other) : words.vote.over(other, one)
}

interface Jury {
  pair: Pair | null
  picked: Choice | null
  last: Done | undefined
  error: ApiError | null
  choose: (choice: Choice) => void
  undo: () => void
  reload: () => void
}

function useJury(book: Book, step: string): Jury {
  const [pair, setPair] = useState<Pair | null>(null)
  const [done, setDone] = useState<readonly Done[]>([])
  const [picked, setPicked] = useState<Choice | null>(null)
  const [error, setError] = useState<ApiError | null>(null)
  const isBusy = useRef(false)
  const latest = useRef(book)
  latest.current = book
  const { path } = book

  /** Runs one action at a time. Key presses during an action are ignored, because the user doesn't
   * mean them for the next pair. */
  const alone = useCallback(async (act: () => Promise<void>) => {
    if (isBusy.current) return
    isBusy.current = true
    setError(null)
    try {
      await act()
    } catch (thrown) {
      setError(asApiError(thrown))
    } finally {
      isBusy.current = false
      setPicked(null)
    }
  }, [])

  const read = useCallback(
    async (votes: readonly Done[]): Promise<Pair> => {
      const skipped = votes.filter((vote) => vote.choice === "skip").slice(-SKIPPED_MAX)
      const ids = skipped.flatMap((vote) => vote.pair.candidates.map(({ id }) => id))
      const answer = await api.get<PairAnswer>(`${path}/pair`, { query: { step, skipped: ids } })
      const candidates = answer.candidates.map(
        (candidate) => latest.current.byId.get(candidate.id) ?? { ...candidate, urlAt: performance.now() },
      )
      return { answer, candidates, ratios: await Promise.all(candidates.map(ratioOf)) }
    },
    [path, step],
  )
  const latestDone = useRef(done)
  latestDone.current = done
  const reload = useCallback(
    () => void alone(async () => setPair(await read(latestDone.current))),
    [alone, read],
  )
  useEffect(reload, [reload])
  // The pair is read again if a second candidate arrives, or if one of the pair is rejected
  // elsewhere.
  const isOver =
    pair?.candidates.some((candidate) => book.byId.get(candidate.id)?.status === "rejected") ?? false
  const isShort = pair !== null && pair.candidates.length < 2
  // biome-ignore lint/correctness/useExhaustiveDependencies: runs whenever the number of candidates changes
  useEffect(() => {
    if (isShort) reload()
    if (!isOver) return undefined
    // A candidate may have been restored before its event arrives, so the pair is read again.
    const timer = setTimeout(reload, SETTLED_MS)
    return () => clearTimeout(timer)
  }, [isOver, isShort, book.all.length])

  const choose = (choice: Choice) =>
    void alone(async () => {
      if (!pair || pair.candidates.length < 2) return
      setPicked(choice)
      const drawn = new Promise((end) => setTimeout(end, choice === "skip" ? 0 : LOOP_MS))
      const votes = [...done, { choice, pair, voteId: await sendChoice(book, pair, choice) }]
      const next = await read(votes)
      await drawn
      setDone(votes)
      setPair(next)
    })
  const undo = () =>
    void alone(async () => {
      const last = done.at(-1)
      if (!last) return
      await undoChoice(book, last)
      setDone(done.slice(0, -1))
      setPair(last.pair)
    })
  return { pair, picked, last: done.at(-1), error, choose, undo, reload }
}

/** Sends the choice and returns the vote's id, or null if it wasn't a vote. */
async function sendChoice(
  book: Book,
  { candidates: [one, other] }: Pair,
  choice: Choice,
): Promise<string | null> {
  if (!one || !other || choice === "skip") return null
  if (choice === "reject") {
    await sendVerdict(book, one.id, "reject")
    await sendVerdict(book, other.id, "reject")
    return null
  }
  const [winner, loser] = choice === "right" ? [other, one] : [one, other]
  const body = { id: crypto.randomUUID(), winner: winner.id, loser: loser.id, is_tie: choice === "tie" }
  return (await api.post<VoteAnswer>(`${book.path}/vote`, body)).id
}

async function undoChoice(book: Book, { choice, voteId, pair }: Done): Promise<void> {
  if (voteId) await api.post<VoteAnswer>(`${book.path}/votes/${voteId}/undo`)
  if (choice !== "reject") return
  for (const candidate of pair.candidates) await sendVerdict(book, candidate.id, "undo")
}

/** Waits until the picture can be drawn, so that both pictures of a pair appear at the same
 * time. */
async function ratioOf(candidate: Candidate): Promise<number> {
  if (!candidate.url || !isPicture(candidate)) return USUAL_RATIO
  const image = new Image()
  image.src = candidate.url
  const late = new Promise((end) => setTimeout(end, PICTURE_MS_MAX))
  await Promise.race([image.decode().catch(() => undefined), late])
  return image.naturalHeight > 0 ? image.naturalWidth / image.naturalHeight : USUAL_RATIO
}

function useKeys(choose: (choice: Choice) => void, undo: () => void, onLarge: () => void): void {
  const latest = useRef({ choose, undo, onLarge })
  latest.current = { choose, undo, onLarge }
  useEffect(() => {
    const handle = (event: KeyboardEvent) => {
      if (isForAnotherElement(event) || event.repeat) return
      const key = event.key.length === 1 ? event.key.toLowerCase() : event.key
      const choice = KEYS[key]
      const button = (event.target as HTMLElement).closest?.("button, a")
      const isPlain = button && !button.closest(".pipeline-run-pair")
      if (choice) latest.current.choose(choice)
      else if (key === "u") latest.current.undo()
      else if (key === " " && !isPlain) latest.current.onLarge()
      else return
      event.preventDefault()
    }
    window.addEventListener("keydown", handle)
    return () => window.removeEventListener("keydown", handle)
  }, [])
}
