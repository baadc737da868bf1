/** Creates a pipeline from a document. All errors are shown together, with step and field. */

import { useState } from "react"
import { useLocation } from "wouter"
import { type ApiError, api, cache, useAct, useQuery } from "@/api"
import type { PipelineAnswer, PublicEffects } from "@/api/schema"
import { Button, Dialog, ErrorNote, TextArea } from "@/ui"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/pipelines"

export function NewPipeline({ open, onClose }: { open: boolean; onClose: () => void }) {
  return (
    <Dialog open={open} onClose={onClose} title={words.create.title} wide>
      <Form onClose={onClose} />
    </Dialog>
  )
}

function Form({ onClose }: { onClose: () => void }) {
  const [, go] = useLocation()
  const effects = useQuery<PublicEffects>("/api/effects", { query: { limit: 100 }, freshSeconds: 60 })
  const [typed, setTyped] = useState<string | null>(null)
  const text = typed ?? words.create.example(effects.data?.effects[0]?.slug ?? words.create.anEffect)
  const create = useAct(async () => {
    const pipeline = await api.post<PipelineAnswer>("/api/pipelines", { document: text })
    cache.invalidate("/api/pipelines")
    go(`/pipelines/${pipeline.id}`)
  })
  return (
    <form
      className="stack pipelines-new"
      onSubmit={(event) => {
        event.preventDefault()
        void create.run()
      }}
    >
      <TextArea
        label={words.create.label}
        hint={words.create.hint}
        rows={14}
        spellCheck={false}
        value={text}
        onChange={(event) => setTyped(event.target.value)}
      />
      {create.error && <Problems error={create.error} />}
      <div className="dialog-actions">
        <Button onClick={onClose}>{common.cancel}</Button>
        <Button kind="go" type="submit" busy={create.isRunning}>
          {words.create.act}
        </Button>
      </div>
    </form>
  )
}

interface Problem {
  step: string | null
  field: string | null
  message: string
}

function Problems({ error }: { error: ApiError }) {
  const problems = Array.isArray(error.details.problems) ? (error.details.problems as Problem[]) : []
  if (problems.length === 0) return <ErrorNote error={error} />
  return (
    <div role="alert" className="pipelines-problems">
      <strong>{words.create.problems(problems.length)}</strong>
      <ul>
        {problems.map((problem) => (
          <li key={`${problem.step}.${problem.field}.${problem.message}`}>
            <span className="mono">{[problem.step, problem.field].filter(Boolean).join(".")}</span>{" "}
            {problem.message}
          </li>
        ))}
      </ul>
    </div>
  )
}
