/** The Ctrl-K palette, which finds things, acts on them and opens pages. Arrow keys move, and Enter
 * selects. */

import { type KeyboardEvent, useEffect, useId, useMemo, useRef, useState } from "react"
import { useLocation } from "wouter"
import { api, signOut, useEffectsById, useQuery, useSession } from "@/api"
import type { FoundThings, GraphRunSummaries, PipelineRunSummaries, SearchAnswer } from "@/api/schema"
import { closePalette } from "@/app/paletteState"
import { chooseTheme } from "@/app/theme"
import { copyText, Dialog, ErrorNote, Field, Icon, toast } from "@/ui"
import { words } from "@/words/en/palette"
import {
  customerHits,
  type Group,
  type Hit,
  operatorHits,
  orderedHits,
  placesAndActs,
  runsNamed,
} from "./hits"
import "./palette.css"

const TYPED_MS = 120
const GROUPS: readonly Group[] = ["things", "acts", "places"]

export default function PaletteDialog() {
  const [here, go] = useLocation()
  const isOperator = useSession().data?.kinds.includes("operator") ?? false
  const [text, setText] = useState("")
  const [at, setAt] = useState(0)
  const id = useId()
  const { hits, error, isLoading } = useHits(text, here.startsWith("/console"))
  const current = Math.max(0, Math.min(at, hits.length - 1))
  useInView(`${id}-${current}`)
  const choose = (hit: Hit | undefined) => {
    if (!hit) return
    closePalette()
    if (hit.act) void perform(hit)
    else if (hit.href) go(hit.href)
  }
  const handleKey = (event: KeyboardEvent) => {
    if (event.key === "Enter") choose(hits[current])
    const to = { ArrowDown: current + 1, ArrowUp: current - 1 }[event.key]
    if (to === undefined) return
    event.preventDefault()
    setAt((to + hits.length) % Math.max(1, hits.length))
  }
  return (
    <Dialog open onClose={closePalette} title={words.title}>
      <Field
        label={words.title}
        hideLabel
        icon="search"
        placeholder={isOperator ? words.placeholderOperator : words.placeholder}
        autoFocus
        role="combobox"
        aria-expanded="true"
        aria-controls={id}
        aria-activedescendant={hits[current] ? `${id}-${current}` : undefined}
        value={text}
        maxLength={100}
        autoComplete="off"
        onChange={(event) => {
          setText(event.target.value)
          setAt(0)
        }}
        onKeyDown={handleKey}
        after={<kbd>esc</kbd>}
      />
      {error && <ErrorNote error={error} />}
      {hits.length === 0 && <p className="quiet">{isLoading ? words.searching : words.none}</p>}
      <p className="unseen" role="status">
        {text && !isLoading && words.found(hits.length)}
      </p>
      <div id={id} role="listbox" aria-label={words.title} className="palette-list">
        {GROUPS.map((group) => (
          <HitGroup key={group} id={id} group={group} hits={hits} current={current} onChoose={choose} />
        ))}
      </div>
    </Dialog>
  )
}

interface HitGroupProps {
  id: string
  group: Group
  hits: readonly Hit[]
  current: number
  onChoose: (hit: Hit) => void
}

function HitGroup({ id, group, hits, current, onChoose }: HitGroupProps) {
  if (!hits.some((hit) => hit.group === group)) return null
  const isOnThing = group === "acts" && hits.some((hit) => hit.group === "acts" && hit.thing)
  const title = isOnThing ? words.actsOn(hits[0]?.label ?? "") : words.groups[group]
  return (
    <div role="group" aria-label={title}>
      <div className="palette-title" aria-hidden="true">
        {title}
      </div>
      {hits.map(
        (hit, index) =>
          hit.group === group && (
            // biome-ignore lint/a11y/useKeyWithClickEvents: the text field handles the keys
            <div
              key={hit.key}
              id={`${id}-${index}`}
              role="option"
              aria-selected={index === current}
              className="palette-hit"
              onClick={() => onChoose(hit)}
            >
              <Icon name={hit.icon} />
              <span className="cut-text">{hit.label}</span>
              {hit.note && <span className="faint cut-text">{hit.note}</span>}
            </div>
          ),
      )}
    </div>
  )
}

function useHits(text: string, isConsole: boolean) {
  const kinds = useSession().data?.kinds
  const typed = useTyped(text.trim())
  const query = { q: typed }
  const hasText = typed !== ""
  const mine = useQuery<SearchAnswer>(hasText && kinds?.includes("customer") ? "/api/search" : null, {
    query,
    freshSeconds: 10,
  })
  const all = useQuery<FoundThings>(hasText && kinds?.includes("operator") ? "/api/admin/search" : null, {
    query,
    freshSeconds: 10,
  })
  const effects = useEffectsById(kinds?.includes("customer") ?? false)
  const runs = useRuns(hasText && (kinds?.includes("customer") ?? false))
  const hits = useMemo(() => {
    const named = runsNamed(typed, runs.graphs, runs.pipelines)
    const own = mine.data ? [...customerHits(mine.data, effects), ...named] : []
    const others = all.data ? operatorHits(all.data) : []
    // Results for an earlier text are not offered, because Enter would select them.
    const items = isConsole ? [...others, ...own] : [...own, ...others]
    const things = typed === text.trim() ? items : []
    return orderedHits(things, placesAndActs(text, kinds ?? [], isConsole), text)
  }, [mine.data, all.data, effects, runs, typed, text, kinds, isConsole])
  return {
    hits,
    error: mine.error ?? all.error,
    isLoading: typed !== text.trim() || mine.isFirstLoad || all.isFirstLoad,
  }
}

const RUNS = { query: { limit: 50 }, freshSeconds: 30 }

/** Returns the latest runs, because users usually look for recent work. */
function useRuns(hasText: boolean) {
  const graphs = useQuery<GraphRunSummaries>(hasText ? "/api/graph-runs" : null, RUNS).data?.runs
  const pipelines = useQuery<PipelineRunSummaries>(hasText ? "/api/pipeline-runs" : null, RUNS).data?.runs
  return useMemo(() => ({ graphs: graphs ?? [], pipelines: pipelines ?? [] }), [graphs, pipelines])
}

/** Returns the text once the user has paused typing. */
function useTyped(text: string): string {
  const [typed, setTyped] = useState(text)
  useEffect(() => {
    const timer = setTimeout(() => setTyped(text), TYPED_MS)
    return () => clearTimeout(timer)
  }, [text])
  return typed
}

function useInView(id: string): void {
  const before = useRef(id)
  useEffect(() => {
    if (before.current === id) return
    before.current = id
    document.getElementById(id)?.scrollIntoView({ block: "nearest" })
  }, [id])
}

async function perform(hit: Hit): Promise<void> {
  try {
    if (hit.act === "dark" || hit.act === "light") chooseTheme(hit.act)
    if (hit.act === "out") await signOut()
    if (hit.act === "copy" && hit.href && (await copyText(window.location.origin + hit.href)))
      toast({ title: words.copied })
    if (hit.act === "drain" && hit.thing) await drain(hit.thing.id, hit.note ?? hit.thing.id)
  } catch (thrown) {
    toast({ title: words.failed, text: thrown instanceof Error ? thrown.message : null, state: "failed" })
  }
}

async function drain(workerId: string, name: string): Promise<void> {
  const path = `/api/admin/workers/${encodeURIComponent(workerId)}`
  await api.post(`${path}/drain`)
  toast({
    title: words.drains(name),
    state: "running",
    act: { label: words.undo, run: () => void api.post(`${path}/undrain`) },
  })
}
