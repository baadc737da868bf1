/** Asks the user a question that a node of the run is waiting for. */

import { useEffect, useState } from "react"
import { api, useAct } from "@/api"
import type { Choice, GraphRunAnswer, QuestionSeen } from "@/api/schema"
import { Button, Check, Dialog, ErrorNote, Status, Time, tokens } from "@/ui"
import { words } from "@/words/en/canvas"
import { backendName } from "./follow"

interface QuestionProps {
  runId: string
  question: QuestionSeen
  picture: string | null
  /** The pictures to pick from. Undefined stands for a picture that can't be shown. */
  pictures: readonly (string | undefined)[]
  open: boolean
  onLater: () => void
  onAnswered: (run: GraphRunAnswer, isForAll: boolean, answer: Answer) => void
}

export interface Answer {
  choice: Choice
  backend: string | null
  picked?: readonly number[]
}

export function sendAnswer(runId: string, { node, index }: QuestionSeen, answer: Answer) {
  return api.post<GraphRunAnswer>(`/api/graph-runs/${runId}/answer`, { node, index, ...answer })
}

/** Returns the same answer for another question, or null if it doesn't apply there. */
export function sameAnswer(question: QuestionSeen, { choice, backend }: Answer): Answer | null {
  if (!question.choices.includes(choice) || typeof question.pick_from === "number") return null
  return choice !== "backend" || (backend && question.backends.includes(backend)) ? { choice, backend } : null
}

export function Question(props: QuestionProps) {
  const { runId, question, picture, pictures, open, onLater, onAnswered } = props
  const [picked, setPicked] = useState<readonly number[] | null>(null)
  const options = optionsOf(question, picked)
  const isApproval = question.choices.includes("approve")
  const [key, setKey] = useState(options[0]?.key ?? "")
  const [isForAll, setForAll] = useState(false)
  const chosen = options.find((option) => option.key === key) ?? options[0]
  const act = useAct(async (answer: Answer) => {
    onAnswered(await sendAnswer(runId, question, answer), isForAll, answer)
  })
  const { forget } = act
  // biome-ignore lint/correctness/useExhaustiveDependencies: the form is reset for the next question
  useEffect(() => {
    forget()
    setKey(optionsOf(question, null)[0]?.key ?? "")
    setPicked(null)
  }, [question.node, question.index.join(), forget])
  return (
    <Dialog
      open={open}
      onClose={onLater}
      title={isApproval ? words.askApprove(question.node) : words.askTitle(question.node)}
    >
      <div className="canvas-ask">
        {picture && <img src={picture} alt="" />}
        <div>
          <Status status="waiting" pill />
          <p>{isApproval ? question.message : words.askText(question.message)}</p>
        </div>
      </div>
      {isApproval && question.pick_from === null && pictures.length > 0 && (
        <div className="canvas-picks">
          {pictures.slice(0, PICKS_MAX).map((url, at) => (
            <img key={url} src={url} alt={words.pickOne(at + 1)} />
          ))}
        </div>
      )}
      {isApproval && question.pick_from !== null && (
        <Picks count={question.pick_from} {...{ pictures, picked }} onPick={setPicked} />
      )}
      {!isApproval && question.backends.length === 0 && <p className="faint">{words.askNoBackend}</p>}
      <fieldset className="canvas-choices">
        <legend className="unseen">{question.message}</legend>
        {options.map((option) => (
          <label key={option.key}>
            <input
              type="radio"
              name="backend"
              checked={option.key === chosen?.key}
              onChange={() => setKey(option.key)}
            />
            <span>
              <b>{option.title}</b>
              <span className="faint">{option.hint}</span>
            </span>
          </label>
        ))}
      </fieldset>
      {question.pick_from === null && (
        <Check
          label={words.sameForRest}
          checked={isForAll}
          onChange={(event) => setForAll(event.target.checked)}
        />
      )}
      {act.error && <ErrorNote error={act.error} />}
      <p className="faint">
        {question.deadline ? (
          <>
            {words.askUntil} <Time at={question.deadline} />.
          </>
        ) : (
          words.askWaits
        )}
      </p>
      <div className="dialog-actions">
        <Button
          kind="stop"
          busy={act.isRunning}
          onClick={() => void act.run({ choice: "fail", backend: null })}
        >
          {words.giveUp}
        </Button>
        <Button kind="ghost" onClick={onLater}>
          {words.later}
        </Button>
        {chosen && (
          <Button
            kind="go"
            busy={act.isRunning}
            onClick={() => void act.run(withPicked(chosen.answer, picked))}
          >
            {chosen.act}
          </Button>
        )}
      </div>
    </Dialog>
  )
}

function withPicked(answer: Answer, picked: readonly number[] | null): Answer {
  return answer.choice === "approve" && picked ? { ...answer, picked } : answer
}

interface PicksProps {
  count: number
  pictures: readonly (string | undefined)[]
  picked: readonly number[] | null
  onPick: (picked: readonly number[] | null) => void
}

/** Shows the pictures to pick from. If the user marks none, all of them count as picked. */
function Picks({ count, pictures, picked, onPick }: PicksProps) {
  const toggled = (at: number) => {
    const next = picked?.includes(at) ? picked.filter((index) => index !== at) : [...(picked ?? []), at]
    return next.length > 0 ? next : null
  }
  return (
    <div className="canvas-picks">
      {Array.from({ length: Math.min(count, PICKS_MAX) }, (_, at) => at).map((at) => (
        <label key={at}>
          {pictures[at] && <img src={pictures[at]} alt="" />}
          <span>
            <input
              type="checkbox"
              checked={picked?.includes(at) ?? false}
              onChange={() => onPick(toggled(at))}
            />{" "}
            {words.pickOne(at + 1)}
          </span>
        </label>
      ))}
    </div>
  )
}

const PICKS_MAX = 200

interface Option {
  key: string
  title: string
  hint: string
  act: string
  answer: Answer
}

function optionsOf(question: QuestionSeen, picked: readonly number[] | null): Option[] {
  const { backends, choices, pick_from, price_tokens: price } = question
  const costs = typeof price === "number" ? `, ${tokens(price)}` : ""
  const options: Option[] = backends.map((backend, at) => ({
    key: backend,
    title: backendName(backend),
    hint: `${at === 0 ? words.best : words.fitting}${costs}`,
    act: words.goOnWith(backendName(backend)),
    answer: { choice: "backend", backend },
  }))
  if (choices.includes("approve"))
    options.push({
      key: "approve",
      title: words.approveAll,
      hint: pick_from === null ? words.approveHint : words.pickHint(picked?.length ?? 0, pick_from),
      act: pick_from === null ? words.approveAll : words.approvePicked(picked?.length ?? 0, pick_from),
      answer: { choice: "approve", backend: null },
    })
  if (choices.includes("reject"))
    options.push({
      key: "reject",
      title: words.reject,
      hint: words.rejectHint,
      act: words.reject,
      answer: { choice: "reject", backend: null },
    })
  if (choices.includes("retry"))
    options.push({
      key: "retry",
      title: words.choices.retry,
      hint: `${words.choices.retryHint}${costs}`,
      act: words.goOnRetry,
      answer: { choice: "retry", backend: null },
    })
  if (choices.includes("skip"))
    options.push({
      key: "skip",
      title: words.choices.skip,
      hint: words.choices.skipHint,
      act: words.goOnSkip,
      answer: { choice: "skip", backend: null },
    })
  return options
}
