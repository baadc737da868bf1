/** Keeps a run and its candidates up to date: events change known candidates, and only new ones
 * are read. */

import { useEffect, useMemo, useRef, useState } from "react"
import { api, cache, pathOf, type QueryResult, useEvents, useQuery } from "@/api"
import type { CandidateAnswer, CandidatePage, PipelineRunAnswer } from "@/api/schema"
import {
  added,
  type Candidate,
  type CandidateEvent,
  type Candidates,
  labelsOf,
  waitingIds,
  withEvent,
  withStableUrls,
} from "./candidates"

const PAGE = 100
/** The number of candidates read at once. More are read on request. */
const READ_MAX = 1_000
const BATCH_MS = 200
const URLS_MS = 600_000

export interface Book {
  id: string
  path: string
  run: QueryResult<PipelineRunAnswer>
  list: QueryResult<Candidates>
  all: readonly Candidate[]
  byId: ReadonlyMap<string, Candidate>
  labels: ReadonlyMap<string, string>
  waiting: ReadonlySet<string>
  /** Stores a candidate from an API response. */
  put: (candidate: CandidateAnswer) => void
  more: () => Promise<void>
  /** Called when a picture can't be loaded, which may mean that its URL has expired. */
  renew: (candidate: Candidate) => void
}

const NONE: readonly Candidate[] = []

export function useBook(id: string): Book {
  const path = `/api/pipeline-runs/${encodeURIComponent(id)}`
  const run = useQuery<PipelineRunAnswer>(path)
  // The candidates are read only after the run. Events after the run's last event then cover all
  // later changes.
  const list = useQuery<Candidates>(run.data ? `${path}/candidates` : null, {
    read: (signal) => readAll(path, signal),
  })
  useLive(path, run.data?.last_event_id)
  const all = list.data?.all ?? NONE
  const steps = run.data?.steps
  return useMemo(
    () => ({
      id,
      path,
      run,
      list,
      all,
      byId: new Map(all.map((candidate) => [candidate.id, candidate])),
      labels: labelsOf(all),
      waiting: waitingIds(all, steps ?? []),
      put: (candidate) => keep(path, [candidate]),
      more: () => readMore(path),
      renew: (candidate) => renew(path, candidate),
    }),
    [id, path, run, list, all, steps],
  )
}

function keyOf(path: string): string {
  return `${path}/candidates`
}

function keep(path: string, fresh: readonly CandidateAnswer[]): void {
  cache.set<Candidates>(keyOf(path), (before) => before && added(before, fresh, performance.now()))
}

async function readAll(path: string, signal: AbortSignal): Promise<Candidates> {
  const before = cache.entry<Candidates>(keyOf(path)).data?.all ?? NONE
  const most = Math.max(READ_MAX, before.length)
  const candidates: CandidateAnswer[] = []
  let next: string | null = null
  do {
    const page: CandidatePage = await api.get<CandidatePage>(keyOf(path), {
      query: { limit: PAGE, after: next },
      signal,
    })
    candidates.push(...page.candidates)
    next = page.next
  } while (next !== null && candidates.length < most)
  return { all: withStableUrls(before, candidates, performance.now()), next }
}

/** Reads the candidates after the last known one. */
async function readMore(path: string): Promise<void> {
  let after = cache.entry<Candidates>(keyOf(path)).data?.all.at(-1)?.id ?? null
  for (let read = 0; read < READ_MAX; read += PAGE) {
    const page: CandidatePage = await api.get<CandidatePage>(pathOf(keyOf(path), { limit: PAGE, after }))
    keep(path, page.candidates)
    const { next } = page
    cache.set<Candidates>(keyOf(path), (before) => before && { ...before, next })
    if (next === null) return
    after = next
  }
}

const renewed = new Set<string>()

function renew(path: string, { url }: Candidate): void {
  if (!url || renewed.has(url)) return
  renewed.add(url)
  cache.set<Candidates>(
    keyOf(path),
    (before) =>
      before && {
        ...before,
        all: before.all.map((candidate) => ({ ...candidate, urlAt: Number.NEGATIVE_INFINITY })),
      },
  )
  void cache.reload(keyOf(path))
}

function useLive(path: string, lastEventId: number | undefined): void {
  const [from, setFrom] = useState<number | null>(null)
  useEffect(() => {
    if (lastEventId !== undefined) setFrom((before) => before ?? lastEventId)
  }, [lastEventId])
  const later = useLater(path)
  useEvents<CandidateEvent>(
    from === null ? null : pathOf(`${path}/events`, { after: from }),
    (data, { event }) => {
      cache.set<Candidates>(keyOf(path), (before) => before && withEvent(before, event, data))
      later(event, data)
    },
  )
  useEffect(() => {
    const timer = setInterval(() => cache.reload(keyOf(path)), URLS_MS)
    return () => clearInterval(timer)
  }, [path])
}

interface PendingReads {
  newIds: readonly string[]
  isWhole: boolean
  isVoted: boolean
  isFailed: boolean
}

const NOTHING: PendingReads = { newIds: [], isWhole: false, isVoted: false, isFailed: false }

/** Reads new candidates after the known ones. If two were written at the same moment, the whole
 * list is read again. */
async function readNew(path: string, newIds: readonly string[]): Promise<void> {
  const before = cache.entry<Candidates>(keyOf(path)).data
  if (before?.next) return
  await readMore(path).catch(() => undefined)
  const ids = new Set(cache.entry<Candidates>(keyOf(path)).data?.all.map((candidate) => candidate.id))
  if (!newIds.every((id) => ids.has(id))) await cache.reload(keyOf(path))
}

/** Collects the reads that events request within a short time, and runs them once. */
function useLater(path: string): (event: string, data: CandidateEvent) => void {
  const timer = useRef<ReturnType<typeof setTimeout> | null>(null)
  const pending = useRef<PendingReads>({ ...NOTHING })
  useEffect(() => () => void (timer.current && clearTimeout(timer.current)), [])
  const read = () => {
    const { newIds, isWhole, isVoted, isFailed } = pending.current
    pending.current = { ...NOTHING }
    timer.current = null
    void cache.reload(path)
    cache.invalidate("/api/wallet")
    if (isWhole) void cache.reload(keyOf(path))
    else if (newIds.length > 0) void readNew(path, newIds)
    if (isVoted) cache.invalidate(`${keyOf(path)}/`)
    if (isFailed) cache.invalidate(`${path}/failures`)
  }
  return (event, data) => {
    const now = pending.current
    if (event === "candidates") now.newIds = [...now.newIds, ...(data.candidates ?? [])]
    // A change that is reported while the list is being read may be missing from the list.
    const isKnown = cache.entry<Candidates>(keyOf(path)).data !== undefined
    now.isWhole ||= !isKnown || event === "vote_undone" || event === "files_removed" || event === "retried"
    now.isVoted ||= event === "voted" || event === "vote_undone"
    now.isFailed ||= event === "job_failed" || event === "retried"
    timer.current ??= setTimeout(read, BATCH_MS)
  }
}
