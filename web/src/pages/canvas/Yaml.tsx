/** Edits the document as text, in sync with the drawing. The control plane parses it, because it
 * supports all of YAML. */

import { useEffect, useRef, useState } from "react"
import { type ApiError, api, asApiError } from "@/api"
import type { Verdict } from "@/api/schema"
import { CopyButton, TextArea } from "@/ui"
import { words } from "@/words/en/canvas"
import { documentOf, type GraphDocument, isSame } from "./document"
import { yamlOf } from "./yaml"

const PAUSE_MS = 350

interface YamlProps {
  document: GraphDocument
  isReadOnly: boolean
  onChange: (document: GraphDocument) => void
}

export function Yaml({ document, isReadOnly, onChange }: YamlProps) {
  const [text, setText] = useState(() => yamlOf(document))
  const [error, setError] = useState<ApiError | null>(null)
  const shown = useRef(document)
  const latest = useRef({ document, onChange })
  latest.current = { document, onChange }
  useEffect(() => {
    if (isSame(document, shown.current)) return
    shown.current = document
    setText(yamlOf(document))
    setError(null)
  }, [document])
  const [typed, setTyped] = useState<string | null>(null)
  useEffect(() => {
    if (typed === null) return undefined
    const abort = new AbortController()
    const timer = setTimeout(() => {
      void read(typed, abort.signal).then(
        (parsed) => {
          if (abort.signal.aborted) return
          setError(null)
          if (!parsed || isSame(parsed, latest.current.document)) return
          shown.current = parsed
          latest.current.onChange(parsed)
        },
        (thrown) => abort.signal.aborted || setError(asApiError(thrown)),
      )
    }, PAUSE_MS)
    return () => {
      clearTimeout(timer)
      abort.abort()
    }
  }, [typed])
  return (
    <aside className="canvas-side canvas-yaml" aria-label={words.yaml}>
      <TextArea
        label={words.yamlLabel}
        hint={words.yamlHint}
        error={error?.message}
        value={text}
        readOnly={isReadOnly}
        spellCheck={false}
        aside={<CopyButton text={text} size="small" kind="ghost" />}
        onChange={(event) => {
          setText(event.target.value)
          setTyped(event.target.value)
        }}
      />
    </aside>
  )
}

async function read(text: string, signal: AbortSignal): Promise<GraphDocument | null> {
  const verdict = await api.post<Verdict>("/api/graphs/validate", { document: text }, { signal })
  return documentOf(verdict.document)
}
