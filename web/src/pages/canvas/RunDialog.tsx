/** Asks for a run's inputs, and shows its price before it starts. */

import { useCallback, useEffect, useMemo, useState } from "react"
import { useLocation } from "wouter"
import { type ApiError, api, asApiError, useAct, useQuery } from "@/api"
import type { GraphRunAnswer, QuoteAnswer } from "@/api/schema"
import { Button, Check, Dialog, duration, ErrorNote, Field, LinkButton, TextArea, tokens } from "@/ui"
import { words } from "@/words/en/canvas"
import { type Chosen, forget } from "../effect/Media"
import { OneFile, sentId } from "../effect/OneFile"
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

type Given = Record<string, unknown>
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
  const [typed, setTyped] = useState<Given>(() => defaultsOf(inputs))
  const [files, setFiles] = useState<Files>({})
  const [limit, setLimit] = useState("")
  const given = useMemo(() => givenOf(inputs, typed, files), [inputs, typed, files])
  const { quote, error } = useQuote(graphId, version, given)
  const wallet = useQuery<{ balance: number }>("/api/wallet", { freshSeconds: 10 })
  const lacking = quote && wallet.data ? Math.max(0, quote.tokens_min - wallet.data.balance) : 0
  const start = useAct(async () => {
    const sent = await uploaded(inputs, files)
    const body = { inputs: { ...given, ...sent }, version, ...(limit ? { max_tokens: Number(limit) } : {}) }
    const idempotencyKey = crypto.randomUUID()
    const run = await api.post<GraphRunAnswer>(`/api/graphs/${graphId}/runs`, body, { idempotencyKey })
    go(`/graphs/${graphId}/runs/${run.id}`)
  })
  const missing = inputs.find((each) => isNeeded(each) && !isGiven(each, typed, files))
  const price = quote && words.quoteRange(quote.tokens_min, quote.tokens_max, tokens)
  return (
    <>
      <p className="quiet">{inputs.length > 0 ? words.runText : words.inputsNone}</p>
      <div className="canvas-inputs">
        {inputs.map((each) => (
          <OneInput
            key={each.id}
            node={each}
            value={own(typed, each.id)}
            files={own(files, each.id) ?? [null]}
            onType={(value) => setTyped((before) => ({ ...before, [each.id]: value }))}
            onFiles={(chosen) => setFiles((before) => ({ ...before, [each.id]: chosen }))}
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
      {quote?.warnings.map((each) => (
        <p key={`${each.node}${each.code}`} className="canvas-warning">
          {each.node}: {each.message}
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
            <span className="faint">{words.tooFew(tokens(lacking))}</span>
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

function defaultsOf(inputs: readonly GraphNode[]): Given {
  const told = inputs.filter((each) => each.default !== undefined)
  return Object.fromEntries(told.map((each) => [each.id, shown(each.default)]))
}

function shown(value: unknown): unknown {
  if (Array.isArray(value)) return value.map((each) => String(each)).join("\n")
  return typeof value === "object" && value !== null ? JSON.stringify(value) : value
}

function isGiven(node: GraphNode, typed: Given, files: Files): boolean {
  if (isMedia(node)) return (own(files, node.id) ?? []).some(Boolean)
  return own(typed, node.id) !== undefined && own(typed, node.id) !== ""
}

/** Returns the inputs for the quote: all typed values and the number of files, including files
 * that are still being uploaded. */
export function givenOf(inputs: readonly GraphNode[], typed: Given, files: Files): Given {
  const found: Given = {}
  for (const node of inputs) {
    if (isMedia(node)) {
      const ids = (own(files, node.id) ?? []).flatMap((each) => (each ? (each.mediaId ?? each.name) : []))
      if (ids.length > 0) found[node.id] = typeOf(node).endsWith("[]") ? ids : ids[0]
    } else if (isGiven(node, typed, files)) found[node.id] = asType(own(typed, node.id), typeOf(node))
  }
  return found
}

export function asType(value: unknown, type: string): unknown {
  if (typeof value !== "string") return value
  if (!type.endsWith("[]")) return typedValue(value, type)
  const inner = type.slice(0, -2)
  return value
    .split("\n")
    .filter((each) => each.trim() !== "")
    .map((each) => typedValue(each, inner))
}

/** Waits for uploads, and returns the media ids of the files. */
async function uploaded(inputs: readonly GraphNode[], files: Files): Promise<Given> {
  const found: Given = {}
  for (const node of inputs) {
    const ids: string[] = []
    for (const each of own(files, node.id) ?? []) {
      if (!each) continue
      ids.push(await sentId(each, words.missing(node.id)))
    }
    if (ids.length > 0) found[node.id] = typeOf(node).endsWith("[]") ? ids : ids[0]
  }
  return found
}

function useQuote(graphId: string, version: number, given: Given) {
  const [told, setTold] = useState<{ quote: QuoteAnswer | null; error: ApiError | null }>({
    quote: null,
    error: null,
  })
  const inputs = JSON.stringify(given)
  useEffect(() => {
    const abort = new AbortController()
    const timer = setTimeout(() => {
      const body = { inputs: JSON.parse(inputs) as Given, version }
      api.post<QuoteAnswer>(`/api/graphs/${graphId}/quote`, body, { signal: abort.signal }).then(
        (quote) => setTold({ quote, error: null }),
        (thrown) => {
          if (!abort.signal.aborted) setTold((before) => ({ ...before, error: asApiError(thrown) }))
        },
      )
    }, PAUSE_MS)
    return () => {
      clearTimeout(timer)
      abort.abort()
    }
  }, [graphId, version, inputs])
  return told
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
      onFiles(files.map((each, place) => (place === at ? chosen : each)))
    },
    [files, onFiles],
  )
  return (
    <>
      {files.map((each, at) => (
        <OneFile
          // biome-ignore lint/suspicious/noArrayIndexKey: a list item is identified by its position
          key={at}
          label={isList ? `${node.id} ${at + 1}` : node.id}
          kind={kind}
          chosen={each}
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
