/** Asks for a run's inputs, and shows its price before it starts. */

import { useCallback, useEffect, useMemo, useState } from "react"
import { useLocation } from "wouter"
import { type ApiError, api, asApiError, useAct, useQuery } from "@/api"
import type { GraphRunAnswer, QuoteAnswer } from "@/api/schema"
import { Button, Check, Dialog, duration, ErrorNote, Field, LinkButton, TextArea, tokens } from "@/ui"
import { words } from "@/words/en/canvas"
import { type Chosen, forget } from "../effect/Media"
import { OneFile, uploadedId } from "../effect/OneFile"
import "../effect/effect.css"
import { type GraphNode, own } from "./document"
import { typedValue } from "./Expression"
import { MEDIA } from "./types"

interface RunDialogProps {
  open: boolean
  onClose: () => void
  graphId: string
  name: string
  version: number
  inputs: readonly GraphNode[]
}

type InputValues = Record<string, unknown>
type Files = Record<string, readonly (Chosen | null)[]>

const PAUSE_MS = 300

export function RunDialog(props: RunDialogProps) {
  return (
    <Dialog open={props.open} onClose={props.onClose} title={words.runTitle(props.name)} wide>
      <RunForm {...props} />
    </Dialog>
  )
}

function RunForm({ graphId, version, inputs, onClose }: RunDialogProps) {
  const [, go] = useLocation()
  const [typed, setTyped] = useState<InputValues>(() => defaultsOf(inputs))
  const [files, setFiles] = useState<Files>({})
  const [limit, setLimit] = useState("")
  const values = useMemo(() => valuesForQuote(inputs, typed, files), [inputs, typed, files])
  const { quote, error } = useQuote(graphId, version, values)
  const wallet = useQuery<{ balance: number }>("/api/wallet", { freshSeconds: 10 })
  const lacking = quote && wallet.data ? Math.max(0, quote.tokens_min - wallet.data.balance) : 0
  const start = useAct(async () => {
    const sent = await uploadFiles(inputs, files)
    const body = { inputs: { ...values, ...sent }, version, ...(limit ? { max_tokens: Number(limit) } : {}) }
    const idempotencyKey = crypto.randomUUID()
    const run = await api.post<GraphRunAnswer>(`/api/graphs/${graphId}/runs`, body, { idempotencyKey })
    go(`/graphs/${graphId}/runs/${run.id}`)
  })
  const missing = inputs.find((node) => isNeeded(node) && !isFilled(node, typed, files))
  const price = quote && words.quoteRange(quote.tokens_min, quote.tokens_max, tokens)
  return (
    <>
      <p className="quiet">{inputs.length > 0 ? words.runText : words.inputsNone}</p>
      <div className="canvas-inputs">
        {inputs.map((node) => (
          <OneInput
            key={node.id}
            node={node}
            value={own(typed, node.id)}
            files={own(files, node.id) ?? [null]}
            onType={(value) => setTyped((before) => ({ ...before, [node.id]: value }))}
            onFiles={(chosen) => setFiles((before) => ({ ...before, [node.id]: chosen }))}
          />
        ))}
      </div>
      <dl className="canvas-quote" aria-live="polite">
        <dt>{words.quote}</dt>
        <dd>
          <strong>{price ?? "…"}</strong>
          {quote && <span>{words.jobs(quote.jobs_min, quote.jobs_max)}</span>}
          {quote && quote.seconds_max > 0 && <span>{words.takes(duration(quote.seconds_max))}</span>}
        </dd>
      </dl>
      {quote?.warnings.map((problem) => (
        <p key={`${problem.node}${problem.code}`} className="canvas-warning">
          {problem.node}: {problem.message}
        </p>
      ))}
      <Field
        label={words.limit}
        hint={words.limitHint}
        type="number"
        min={0}
        value={limit}
        onChange={(event) => setLimit(event.target.value)}
      />
      {error && !missing && <ErrorNote error={error} />}
      {start.error && <ErrorNote error={start.error} />}
      <div className="dialog-actions">
        <Button onClick={onClose}>{words.notNow}</Button>
        {lacking > 0 ? (
          <>
            <span className="faint">{words.tooFew(lacking)}</span>
            <LinkButton kind="go" href="/wallet">
              {words.topUp}
            </LinkButton>
          </>
        ) : (
          <Button
            kind="go"
            busy={start.isRunning}
            offReason={missing && words.missing(missing.id)}
            onClick={() => void start.run()}
          >
            {price ? words.startFor(price) : words.start}
          </Button>
        )}
      </div>
    </>
  )
}

function typeOf(node: GraphNode): string {
  return String(node.value_type ?? "any")
}

function isMedia(node: GraphNode): boolean {
  return MEDIA.has(typeOf(node).replace("[]", ""))
}

function isNeeded(node: GraphNode): boolean {
  return node.required !== false && node.default === undefined
}

function defaultsOf(inputs: readonly GraphNode[]): InputValues {
  const preset = inputs.filter((node) => node.default !== undefined)
  return Object.fromEntries(preset.map((input) => [input.id, shown(input.default)]))
}

function shown(value: unknown): unknown {
  if (Array.isArray(value)) return value.map((item) => String(item)).join("\n")
  return typeof value === "object" && value !== null ? JSON.stringify(value) : value
}

function isFilled(node: GraphNode, typed: InputValues, files: Files): boolean {
  if (isMedia(node)) return (own(files, node.id) ?? []).some(Boolean)
  return own(typed, node.id) !== undefined && own(typed, node.id) !== ""
}

/** Returns the inputs for the quote: all typed values, and placeholders for files that are still
 * being uploaded. */
export function valuesForQuote(inputs: readonly GraphNode[], typed: InputValues, files: Files): InputValues {
  const values: InputValues = {}
  for (const node of inputs) {
    if (isMedia(node)) {
      const ids = (own(files, node.id) ?? []).flatMap((file) => (file ? (file.mediaId ?? file.name) : []))
      if (ids.length > 0) values[node.id] = typeOf(node).endsWith("[]") ? ids : ids[0]
    } else if (isFilled(node, typed, files)) values[node.id] = asType(own(typed, node.id), typeOf(node))
  }
  return values
}

export function asType(value: unknown, type: string): unknown {
  if (typeof value !== "string") return value
  if (!type.endsWith("[]")) return typedValue(value, type)
  const inner = type.slice(0, -2)
  return value
    .split("\n")
    .filter((line) => line.trim() !== "")
    .map((line) => typedValue(line, inner))
}

/** Waits for uploads, and returns the media ids of the files. */
async function uploadFiles(inputs: readonly GraphNode[], files: Files): Promise<InputValues> {
  const mediaIds: InputValues = {}
  for (const node of inputs) {
    const ids: string[] = []
    for (const file of own(files, node.id) ?? []) {
      if (!file) continue
      ids.push(await uploadedId(file, words.missing(node.id)))
    }
    if (ids.length > 0) mediaIds[node.id] = typeOf(node).endsWith("[]") ? ids : ids[0]
  }
  return mediaIds
}

function useQuote(graphId: string, version: number, values: InputValues) {
  const [answer, setAnswer] = useState<{ quote: QuoteAnswer | null; error: ApiError | null }>({
    quote: null,
    error: null,
  })
  const inputs = JSON.stringify(values)
  useEffect(() => {
    const abort = new AbortController()
    const timer = setTimeout(() => {
      const body = { inputs: JSON.parse(inputs) as InputValues, version }
      api.post<QuoteAnswer>(`/api/graphs/${graphId}/quote`, body, { signal: abort.signal }).then(
        (quote) => setAnswer({ quote, error: null }),
        (thrown) => {
          if (!abort.signal.aborted) setAnswer((before) => ({ ...before, error: asApiError(thrown) }))
        },
      )
    }, PAUSE_MS)
    return () => {
      clearTimeout(timer)
      abort.abort()
    }
  }, [graphId, version, inputs])
  return answer
}

interface OneInputProps {
  node: GraphNode
  value: unknown
  files: readonly (Chosen | null)[]
  onType: (value: unknown) => void
  onFiles: (chosen: readonly (Chosen | null)[]) => void
}

function OneInput({ node, value, files, onType, onFiles }: OneInputProps) {
  const type = typeOf(node)
  if (isMedia(node)) return <Pictures node={node} files={files} onFiles={onFiles} />
  if (type === "boolean")
    return (
      <Check label={node.id} checked={value === true} onChange={(event) => onType(event.target.checked)} />
    )
  const text = value === undefined ? "" : String(value)
  if (type.endsWith("[]") || type === "text" || type === "any")
    return (
      <TextArea
        label={node.id}
        hint={type.endsWith("[]") ? words.list : type === "any" ? words.jsonHint : undefined}
        value={text}
        onChange={(event) => onType(event.target.value)}
      />
    )
  const isNumber = ["number", "integer", "seed"].includes(type)
  return (
    <Field
      label={node.id}
      type={isNumber ? "number" : "text"}
      step={type === "number" ? "any" : 1}
      value={text}
      onChange={(event) =>
        onType(isNumber && event.target.value !== "" ? Number(event.target.value) : event.target.value)
      }
    />
  )
}

function Pictures({ node, files, onFiles }: Pick<OneInputProps, "node" | "files" | "onFiles">) {
  const kind = typeOf(node).replace("[]", "")
  const isList = typeOf(node).endsWith("[]")
  const put = useCallback(
    (at: number, chosen: Chosen | null) => {
      forget(files[at] ?? null)
      onFiles(files.map((file, place) => (place === at ? chosen : file)))
    },
    [files, onFiles],
  )
  return (
    <>
      {files.map((file, at) => (
        <OneFile
          // biome-ignore lint/suspicious/noArrayIndexKey: a list item is identified by its position
          key={at}
          label={isList ? `${node.id} ${at + 1}` : node.id}
          kind={kind}
          chosen={file}
          onChange={(chosen) => put(at, chosen)}
        />
      ))}
      {isList && (
        <Button size="small" icon="plus" onClick={() => onFiles([...files, null])}>
          {words.addFile}
        </Button>
      )}
    </>
  )
}
