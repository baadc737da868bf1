import { describe, expect, it } from "vitest"
import type { BulkAnswer, JobListed } from "@/api/schema"
import { actOn, PART } from "./bulk"
import { chipsOf, filterOf, isJobId, keepViews, parseTyped, searchOf, storedViews, withChips } from "./filter"
import { hasNewJobs, type JobEvent, spansOf, withEvents, withNewest } from "./rows"

const TENANT = "0197a1b2-0000-7000-8000-000000000001"

function row(number: number, changes: Partial<JobListed> = {}): JobListed {
  return {
    id: `job-${number}`,
    tenant_id: TENANT,
    user_id: null,
    workflow: "draw",
    effect: null,
    status: "queued",
    priority: 0,
    attempt: 0,
    worker_id: null,
    percent: null,
    dispatch_id: number,
    reserved_tokens: 0,
    retry_of: null,
    error: null,
    submitted_at: `2026-01-01T00:00:${String(number).padStart(2, "0")}Z`,
    started_at: null,
    completed_at: null,
    ...changes,
  }
}

function event(number: number, changes: Partial<JobEvent> = {}): JobEvent {
  return {
    id: `job-${number}`,
    tenant_id: TENANT,
    workflow: "draw",
    status: "leased",
    priority: 0,
    attempt: 1,
    worker_id: "w1",
    percent: 40,
    error: null,
    started_at: null,
    ended_at: null,
    ...changes,
  }
}

describe("text typed into the filter", () => {
  it("becomes chips", () => {
    expect(parseTyped('state:failed workflow:relight error:"out of memory"').chips).toEqual([
      { key: "status", value: "failed" },
      { key: "workflow", value: "relight" },
      { key: "error", value: "out of memory" },
    ])
  })
  it("accepts the pages' words for statuses", () => {
    expect(parseTyped("state:Running").chips).toEqual([{ key: "status", value: "processing" }])
  })
  it("searches errors for words without a key", () => {
    expect(parseTyped("since:24h CUDA out: of").chips).toEqual([
      { key: "since", value: "24h" },
      { key: "error", value: "CUDA out: of" },
    ])
  })
  it("accepts tenants by name", () => {
    const tenants = new Map([["blitz lab", TENANT]])
    expect(parseTyped('tenant:"Blitz Lab"', tenants).chips).toEqual([{ key: "tenant", value: TENANT }])
  })
  it("keeps words without a meaning", () => {
    expect(parseTyped("state:fine tenant:nobody since:never")).toEqual({
      chips: [],
      rest: "state:fine tenant:nobody since:never",
    })
  })
  it("opens a job if it is a job id", () => {
    expect(isJobId(` ${TENANT} `)).toBe(true)
    expect(isJobId("0197a1b2")).toBe(false)
  })
})

describe("a filter", () => {
  it("survives a round trip through the address", () => {
    const search = "status=failed&status=queued&workflow=a+b&error=out+of+memory&since=24h"
    expect(searchOf(chipsOf(search))).toBe(search)
    expect(chipsOf("status=nonsense&tenant=x&page=3")).toEqual([])
  })
  it("allows several statuses, but one value of any other key", () => {
    const chips = withChips(
      [
        { key: "status", value: "failed" },
        { key: "worker", value: "a" },
      ],
      [
        { key: "status", value: "queued" },
        { key: "worker", value: "b" },
      ],
    )
    expect(searchOf(chips)).toBe("status=failed&status=queued&worker=b")
  })
  it("ends at the current minute", () => {
    const at = (second: number) =>
      filterOf(chipsOf("since=1h"), new Date(Date.UTC(2026, 0, 1, 12, 0, second)))
    expect(at(1)).toEqual({ since: "2026-01-01T11:00:00.000Z" })
    expect(at(59)).toEqual(at(1))
  })
  it("is stored under a name", () => {
    const stored = new Map<string, string>()
    const storage = {
      getItem: (key: string) => stored.get(key) ?? null,
      setItem: (key: string, value: string) => void stored.set(key, value),
    }
    keepViews(storage, [{ name: "Mine", search: "status=failed" }])
    expect(storedViews(storage)).toEqual([{ name: "Mine", search: "status=failed" }])
    stored.set([...stored.keys()][0] as string, '{"not": "a list"}')
    expect(storedViews(storage)).toEqual([])
  })
})

describe("rows", () => {
  it("are added at the front when the newest are read again, and older ones stay", () => {
    const rows = [row(9), row(8), row(2), row(1)]
    const again = withNewest(rows, [row(10), row(8)], false)
    expect(again.map((job) => job.id)).toEqual(["job-10", "job-8", "job-2", "job-1"])
    expect(withNewest(rows, [row(10)], true).map((job) => job.id)).toEqual(["job-10"])
  })
  it("change with events, and are removed when they no longer match", () => {
    const rows = [row(3), row(2)]
    const all = withEvents(rows, [event(3)], {})
    expect(all[0]).toMatchObject({ status: "processing", percent: 40, worker_id: "w1" })
    expect(all[1]).toBe(rows[1])
    expect(withEvents(rows, [event(3)], { status: ["queued"] }).map((job) => job.id)).toEqual(["job-2"])
    expect(withEvents(rows, [event(7)], {})).toBe(rows)
  })
  it("are read again if an event reports a new match", () => {
    expect(hasNewJobs([row(3)], [event(3)], {})).toBe(false)
    expect(hasNewJobs([row(3)], [event(4)], {})).toBe(true)
    expect(hasNewJobs([row(3)], [event(4)], { status: ["failed"] })).toBe(false)
    expect(hasNewJobs([row(3)], [event(4)], { workflow: "other" })).toBe(false)
  })
  it("show how long they waited and ran", () => {
    const now = new Date("2026-01-01T00:01:00Z")
    expect(spansOf(row(0), now)).toEqual({ waited: 60, ran: null })
    const started = { started_at: "2026-01-01T00:00:04Z" }
    expect(spansOf(row(0, started), now)).toEqual({ waited: 4, ran: 56 })
    expect(spansOf(row(0, { ...started, completed_at: "2026-01-01T00:00:10Z" }), now).ran).toBe(6)
  })
})

describe("an action on many jobs", () => {
  const answer = (done: number, next: string | null = null): BulkAnswer => ({
    matched: done,
    done,
    failed: [],
    retries: {},
    next,
    pools_left_out: [],
  })
  it("is sent in batches", async () => {
    const sent: unknown[][] = []
    const ids = Array.from({ length: PART + 1 }, (_, number) => `job-${number}`)
    const done = await actOn("retry", { ids }, null, undefined, async (body) => {
      sent.push(body.ids as unknown[])
      return answer((body.ids as unknown[]).length)
    })
    expect(sent.map((batch) => batch.length)).toEqual([PART, 1])
    expect(done.done).toBe(PART + 1)
  })
  it("continues until no matching job is left", async () => {
    const bodies: Record<string, unknown>[] = []
    const done = await actOn("reprioritise", { filter: { workflow: "draw" } }, 7, undefined, async (body) => {
      bodies.push(body)
      return answer(500, bodies.length < 3 ? `after-${bodies.length}` : null)
    })
    expect(bodies.map((body) => body.after)).toEqual([null, "after-1", "after-2"])
    expect(bodies[0]).toMatchObject({ priority: 7, filter: { workflow: "draw" } })
    expect(done.done).toBe(1500)
  })
})

it("inherited property names in an address aren't taken for time ranges", () => {
  for (const name of ["__proto__", "constructor", "toString"])
    expect(chipsOf(`since=${name}&until=${name}`)).toEqual([])
})
