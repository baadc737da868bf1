/** Edits a run's limits. Changes apply to jobs that are submitted later. */

import { useState } from "react"
import { api, cache, useAct } from "@/api"
import type { PipelineRunAnswer } from "@/api/schema"
import { Button, Dialog, ErrorNote, Field } from "@/ui"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/pipelines"
import { isWhole, numberOf } from "../pipelines/start"
import type { Book } from "./useRun"

interface LimitsProps {
  open: boolean
  onClose: () => void
  run: PipelineRunAnswer
  book: Book
}

export function Limits({ open, onClose, run, book }: LimitsProps) {
  return (
    <Dialog open={open} onClose={onClose} title={words.run.limitsTitle}>
      <Form onClose={onClose} run={run} book={book} />
    </Dialog>
  )
}

function Form({ onClose, run, book }: Omit<LimitsProps, "open">) {
  const [base, setBase] = useState(String(run.base_candidates))
  const [concurrent, setConcurrent] = useState(String(run.limits.concurrent_jobs))
  const [tokens, setTokens] = useState(run.limits.tokens?.toString() ?? "")
  const [candidates, setCandidates] = useState(run.limits.candidates?.toString() ?? "")
  const set = useAct(async () => {
    const limits = {
      concurrent_jobs: Number(concurrent),
      tokens: numberOf(tokens),
      candidates: numberOf(candidates),
    }
    const answer = await api.patch<PipelineRunAnswer>(book.path, { base_candidates: Number(base), limits })
    cache.set<PipelineRunAnswer>(book.path, () => answer)
    onClose()
  })
  const isRight = isWhole(base) && isWhole(concurrent)
  const fields = [
    [words.start.base, base, setBase, ""],
    [words.start.concurrent, concurrent, setConcurrent, ""],
    [words.start.tokens, tokens, setTokens, words.start.noLimit],
    [words.start.candidates, candidates, setCandidates, words.start.noLimit],
  ] as const
  return (
    <form
      className="stack"
      onSubmit={(event) => {
        event.preventDefault()
        if (isRight) void set.run()
      }}
    >
      {fields.map(([label, value, put, placeholder]) => (
        <Field
          key={label}
          label={label}
          inputMode="numeric"
          value={value}
          placeholder={placeholder}
          error={value !== "" && !isWhole(value) && words.start.wrongNumber}
          onChange={(event) => put(event.target.value)}
        />
      ))}
      {set.error && <ErrorNote error={set.error} />}
      <div className="dialog-actions">
        <Button onClick={onClose}>{common.cancel}</Button>
        <Button kind="go" type="submit" busy={set.isRunning} offReason={!isRight && words.start.wrongNumber}>
          {words.run.limitsAct}
        </Button>
      </div>
    </form>
  )
}
