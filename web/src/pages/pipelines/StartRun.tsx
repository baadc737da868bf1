/** Asks for a run's settings and inputs, and starts the run exactly once. */

import { useCallback, useEffect, useRef, useState } from "react"
import { useLocation } from "wouter"
import { api, cache, useAct, useQuery } from "@/api"
import type { AccountAnswer, PipelineAnswer, PipelineRunAnswer, WorkflowOffers } from "@/api/schema"
import { Button, Dialog, ErrorNote, Field, Skeleton } from "@/ui"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/pipelines"
import { type Chosen, forget, MediaInput } from "../effect/Media"
import "../effect/effect.css"
import { filesOf, isWhole, numberOf, readValue, variablesOf } from "./start"

const BYTES_MAX = 2 ** 31

interface StartRunProps {
  pipeline: PipelineAnswer
  open: boolean
  onClose: () => void
}

export function StartRun({ pipeline, open, onClose }: StartRunProps) {
  return (
    <Dialog open={open} onClose={onClose} title={words.start.title(pipeline.name)}>
      <Form pipeline={pipeline} onClose={onClose} />
    </Dialog>
  )
}

/** Waits for the workflows and effects on offer, which determine the variables that are files. */
function Form({ pipeline, onClose }: Omit<StartRunProps, "open">) {
  const offers = useQuery<WorkflowOffers>("/api/workflows", { freshSeconds: 30 })
  const account = useQuery<AccountAnswer>("/api/account", { freshSeconds: 60 })
  if (offers.isFirstLoad || account.isFirstLoad) return <Skeleton height="320px" />
  const kinds = filesOf(pipeline.document, offers.data?.workflows ?? [])
  const most = account.data?.limits.max_upload_bytes ?? BYTES_MAX
  return <KnownForm {...{ pipeline, onClose, kinds, most }} />
}

interface KnownFormProps extends Omit<StartRunProps, "open"> {
  kinds: ReadonlyMap<string, string>
  most: number
}

function KnownForm({ pipeline, onClose, kinds, most }: KnownFormProps) {
  const [, go] = useLocation()
  const files = useFiles()
  const [base, setBase] = useState("4")
  const [concurrent, setConcurrent] = useState("1")
  const [tokens, setTokens] = useState("")
  const [values, setValues] = useState<Record<string, string>>({})
  const [key] = useState(() => crypto.randomUUID())
  const names = variablesOf(pipeline.document)
  const start = useAct(async () => {
    const typed = names.filter((name) => !kinds.has(name))
    const variables = Object.fromEntries(typed.map((name) => [name, readValue(values[name] ?? "")]))
    for (const name of kinds.keys()) variables[name] = await files.idOf(name)
    const limits = {
      concurrent_jobs: Number(concurrent),
      ...(numberOf(tokens) && { tokens: numberOf(tokens) }),
    }
    const body = { base_candidates: Number(base), variables, limits }
    const options = { idempotencyKey: `${key}-${digest(body)}` }
    const run = await api.post<PipelineRunAnswer>(`/api/pipelines/${pipeline.id}/runs`, body, options)
    cache.invalidate("/api/pipeline-runs")
    go(`/pipelines/${pipeline.id}/runs/${run.id}`)
  })
  const missing = [...kinds.keys()].find((name) => !files.chosen[name])
  const isRight = isWhole(base) && isWhole(concurrent) && (tokens === "" || isWhole(tokens))
  const wrong = (text: string) => text !== "" && !isWhole(text) && words.start.wrongNumber
  return (
    <form
      className="stack"
      onSubmit={(event) => {
        event.preventDefault()
        if (isRight) void start.run()
      }}
    >
      <Field
        label={words.start.base}
        hint={words.start.baseHint}
        inputMode="numeric"
        value={base}
        error={wrong(base)}
        onChange={(event) => setBase(event.target.value)}
      />
      {[...kinds].map(([name, kind]) => (
        <MediaInput
          key={name}
          label={words.start.file(name)}
          takes={{ kind, media_types: [], max_bytes: most }}
          effectId=""
          chosen={files.chosen[name] ?? null}
          onChange={(chosen) => files.take(name, chosen)}
        />
      ))}
      {names.map(
        (name) =>
          kinds.has(name) || (
            <Field
              key={name}
              label={words.start.variable(name)}
              hint={words.start.variableHint}
              required
              value={values[name] ?? ""}
              onChange={(event) => setValues({ ...values, [name]: event.target.value })}
            />
          ),
      )}
      <div className="pipelines-two">
        <Field
          label={words.start.concurrent}
          inputMode="numeric"
          value={concurrent}
          error={wrong(concurrent)}
          onChange={(event) => setConcurrent(event.target.value)}
        />
        <Field
          label={words.start.tokens}
          inputMode="numeric"
          value={tokens}
          placeholder={words.start.noLimit}
          error={wrong(tokens)}
          onChange={(event) => setTokens(event.target.value)}
        />
      </div>
      {start.error && <ErrorNote error={start.error} />}
      <div className="dialog-actions">
        <Button onClick={onClose}>{common.cancel}</Button>
        <Button
          kind="go"
          type="submit"
          busy={start.isRunning}
          offReason={!isRight ? words.start.wrongNumber : missing && words.start.fileMissing(missing)}
        >
          {words.start.act}
        </Button>
      </div>
    </form>
  )
}

/** Keeps the files chosen for the run. Uploads of files that aren't used are stopped. */
function useFiles() {
  const [chosen, setChosen] = useState<Record<string, Chosen | null>>({})
  const latest = useRef(chosen)
  latest.current = chosen
  useEffect(() => () => Object.values(latest.current).forEach(forget), [])
  const take = useCallback((name: string, next: Chosen | null) => {
    forget(latest.current[name] ?? null)
    setChosen((before) => ({ ...before, [name]: next }))
  }, [])
  const idOf = async (name: string): Promise<string> => {
    const file = latest.current[name]
    const id = file?.upload ? await file.upload.ended : file?.mediaId
    if (id) return id
    throw file?.upload?.state().error ?? new Error(words.start.fileMissing(name))
  }
  return { chosen, take, idOf }
}

/** Hashes a request's body for its idempotency key, so that a second click with the same values
 * doesn't start another run. */
function digest(body: unknown): string {
  let sum = 7
  for (const letter of JSON.stringify(body)) sum = (sum * 31 + (letter.codePointAt(0) ?? 0)) % 2_147_483_647
  return sum.toString(36)
}
