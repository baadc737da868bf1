/** The editor's state: the drawn graph, undo history, problems and the saved version. */

import { useCallback, useEffect, useMemo, useRef, useState } from "react"
import { type ApiError, api, asApiError, cache, useAct } from "@/api"
import type { GraphAnswer, Verdict } from "@/api/schema"
import { words } from "@/words/en/canvas"
import { documentOf, type GraphDocument, isSame, own, type Places } from "./document"
import { type Draft, draftOf, forgetDraft, keepDraft, type Saved } from "./drafts"
import { withShortMessage } from "./facts"
import { changed, redone, type Sheet, undone } from "./history"
import { filledPlaces, keepPlaces, placesFor, placesOf, type Size, withLayout } from "./layout"

export const NEW = "new"
const CHECK_MS = 250

export interface Editor {
  readonly sheet: Sheet
  readonly saved: Saved | null
  readonly isChanged: boolean
  readonly canUndo: boolean
  readonly canRedo: boolean
  readonly change: (sheet: Sheet, tag?: string | null) => void
  readonly draw: (document: GraphDocument, tag?: string | null) => void
  readonly undo: () => void
  readonly redo: () => void
  readonly tidy: (sizeOf: (id: string) => Size | undefined) => Promise<void>
  readonly verdict: Verdict | null
  readonly checkError: ApiError | null
  /** Resolves with the saved graph, or with nothing if saving was refused. */
  readonly save: () => Promise<Saved | undefined>
  readonly isSaving: boolean
  readonly saveError: ApiError | null
}

export function savedOf(graph: GraphAnswer): Saved {
  const document = documentOf(graph.document) ?? emptyDocument()
  return { id: graph.id, version: graph.version, sheet: { document, places: placesOf(graph) } }
}

function emptyDocument(): GraphDocument {
  return { name: words.unnamed, nodes: [], connections: [] }
}

export function useEditor(key: string, stored: Saved | null): Editor {
  const [draft, setDraft] = useState<Draft>(() =>
    draftOf(key, stored, { document: emptyDocument(), places: {} }),
  )
  const { history, saved } = draft
  const sheet = history.now
  const isChanged = useMemo(
    () => (saved ? !isSame(saved.sheet.document, sheet.document) : sheet.document.nodes.length > 0),
    [saved, sheet.document],
  )
  useEffect(() => keepDraft(key, draft, isChanged), [key, draft, isChanged])
  useEffect(() => {
    if (saved) keepPlaces(saved.id, saved.version, sheet.places)
  }, [saved, sheet.places])
  const put = useCallback((make: (before: Draft["history"]) => Draft["history"]) => {
    setDraft((before) => ({ ...before, history: make(before.history) }))
  }, [])
  const change = useCallback(
    (next: Sheet, tag: string | null = null) => put((before) => changed(before, next, tag)),
    [put],
  )
  const draw = useCallback(
    (document: GraphDocument, tag: string | null = null) =>
      put((before) => changed(before, { ...before.now, document }, tag)),
    [put],
  )
  useMissingPlaces(sheet, put)
  const { verdict, error } = useVerdict(sheet.document)
  const saving = useAct(async () => {
    const graph = await store(withLayout(sheet.document, sheet.places), saved)
    const next = { id: graph.id, version: graph.version, sheet }
    keepPlaces(graph.id, graph.version, sheet.places)
    if (graph.id !== key) {
      keepDraft(graph.id, { history, saved: next }, false)
      forgetDraft(key)
    }
    setDraft((before) => ({ ...before, saved: next }))
    cache.invalidate("/api/graphs")
    return next
  })
  return {
    sheet,
    saved,
    isChanged,
    canUndo: history.past.length > 0,
    canRedo: history.future.length > 0,
    change,
    draw,
    undo: useCallback(() => put(undone), [put]),
    redo: useCallback(() => put(redone), [put]),
    tidy: async (sizeOf) => change({ ...sheet, places: await placesFor(sheet.document, sizeOf) }),
    verdict,
    checkError: error,
    save: saving.run,
    isSaving: saving.isRunning,
    saveError: saving.error,
  }
}

/** Saves a new version, or a copy for the user if the graph belongs to a colleague. */
async function store(document: GraphDocument, saved: Saved | null): Promise<GraphAnswer> {
  if (!saved) return api.post<GraphAnswer>("/api/graphs", { document })
  try {
    return await api.post<GraphAnswer>(`/api/graphs/${saved.id}/versions`, { document })
  } catch (thrown) {
    if (asApiError(thrown).status !== 403) throw thrown
    return api.post<GraphAnswer>("/api/graphs", { document })
  }
}

/** Positions nodes that have no position yet, for example in graphs written as YAML. */
function useMissingPlaces(
  sheet: Sheet,
  put: (make: (before: Draft["history"]) => Draft["history"]) => void,
): void {
  const missing = sheet.document.nodes.filter((node) => !own(sheet.places, node.id))
  const names = missing.map((node) => node.id).join(" ")
  const latest = useRef(sheet)
  latest.current = sheet
  useEffect(() => {
    if (!names) return undefined
    let isOver = false
    void placesFor(latest.current.document).then((laid: Places) => {
      if (isOver) return
      put((before) => ({
        ...before,
        now: { ...before.now, places: filledPlaces(before.now.places, laid) },
      }))
    })
    return () => {
      isOver = true
    }
  }, [names, put])
}

/** Validates the document shortly after the last change. The previous result is shown until then. */
function useVerdict(document: GraphDocument): { verdict: Verdict | null; error: ApiError | null } {
  const [answer, setAnswer] = useState<{ verdict: Verdict | null; error: ApiError | null }>({
    verdict: null,
    error: null,
  })
  useEffect(() => {
    if (document.nodes.length === 0) {
      setAnswer({ verdict: null, error: null })
      return undefined
    }
    const abort = new AbortController()
    const timer = setTimeout(() => {
      api.post<Verdict>("/api/graphs/validate", { document }, { signal: abort.signal }).then(
        (verdict) =>
          setAnswer({
            verdict: { ...verdict, problems: verdict.problems.map(withShortMessage) },
            error: null,
          }),
        (thrown) => {
          if (!abort.signal.aborted) setAnswer((before) => ({ ...before, error: asApiError(thrown) }))
        },
      )
    }, CHECK_MS)
    return () => {
      clearTimeout(timer)
      abort.abort()
    }
  }, [document])
  return answer
}
