/** Builds the palette's list: search results, actions on the first result, and pages. */

import type { FoundThings, GraphRunSummary, PipelineRunSummary, SearchAnswer } from "@/api/schema"
import type { IconName } from "@/ui"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/palette"

export type ThingKind = keyof typeof words.kinds
export type Group = "things" | "acts" | "places"

export interface Hit {
  key: string
  group: Group
  label: string
  /** A note shown beside the title, such as the kind of thing or its state. */
  note?: string
  icon: IconName
  href?: string
  thing?: { kind: ThingKind; id: string; isOperators: boolean }
  act?: "copy" | "drain" | "dark" | "light" | "out"
}

const ICONS: Record<ThingKind, IconName> = {
  effect: "grid",
  media: "picture",
  job: "play",
  worker: "bolt",
  tenant: "person",
  workflow: "sliders",
  graphRun: "play",
  pipelineRun: "play",
}

function thing(
  kind: ThingKind,
  id: string,
  label: string,
  note: string,
  href: string,
  isOperators = false,
): Hit {
  const key = `${isOperators ? "o" : "c"}-${kind}-${id}`
  return { key, group: "things", label, note, icon: ICONS[kind], href, thing: { kind, id, isOperators } }
}

export function customerHits(answer: SearchAnswer, titles: ReadonlyMap<string, { title: string }>): Hit[] {
  const { kinds } = words
  return [
    ...answer.effects.map((effect) =>
      thing("effect", effect.id, effect.title, kinds.effect, `/effects/${effect.slug}`),
    ),
    ...answer.media.map((media) =>
      thing("media", media.id, media.filename ?? words.unnamed, kinds.media, `/media/${media.id}`),
    ),
    ...answer.jobs.map((job) => {
      const title = titles.get(job.effect_id ?? "")?.title ?? kinds.job
      return thing("job", job.id, `${title}, ${job.id.slice(0, 8)}`, job.status, `/results/${job.id}`)
    }),
  ]
}

const RUNS_MAX = 5

/** Returns the latest runs with an id, or a word in the name, that starts with the text. */
export function runsNamed(
  text: string,
  graphs: readonly GraphRunSummary[],
  pipelines: readonly PipelineRunSummary[],
): Hit[] {
  const { kinds } = words
  const runs = [
    ...graphs.map((run) => ({
      ...run,
      kind: "graphRun" as const,
      href: `/graphs/${run.graph_id}/runs/${run.id}`,
    })),
    ...pipelines.map((run) => ({
      ...run,
      name: run.pipeline ?? "",
      kind: "pipelineRun" as const,
      href: `/pipelines/${run.pipeline_id}/runs/${run.id}`,
    })),
  ].filter((run) => begins(run.name ?? "", text) || begins(run.id, text))
  return runs
    .sort((one, other) => Date.parse(other.created_at) - Date.parse(one.created_at))
    .slice(0, RUNS_MAX)
    .map(({ kind, id, name, status, href }) => {
      const note = `${kinds[kind]}, ${status.replaceAll("_", " ")}`
      return thing(kind, id, `${name || kinds[kind]}, ${id.slice(0, 8)}`, note, href)
    })
}

export function operatorHits(answer: Pick<FoundThings, "found">): Hit[] {
  return answer.found.map(({ kind, id, name, detail }) => {
    const label = kind === "job" ? `${name}, ${id.slice(0, 8)}` : name
    const href = `/console/${kind}s/${encodeURIComponent(id)}`
    return thing(kind, id, label, `${words.kinds[kind]}, ${detail}`, href, true)
  })
}

/** Returns the actions that are available for one result. */
export function actsOn(hit: Hit): Hit[] {
  if (!hit.thing) return []
  const base = { group: "acts", thing: hit.thing, ...(hit.href ? { href: hit.href } : {}) } as const
  const copy: Hit = { ...base, key: "copy", label: words.copyLink, icon: "link", act: "copy" }
  if (hit.thing.kind !== "worker") return [copy]
  return [{ ...base, key: "drain", label: words.drain, icon: "pause", act: "drain", note: hit.label }, copy]
}

const GENERAL: readonly Hit[] = [
  { key: "dark", group: "acts", label: words.dark, icon: "moon", act: "dark" },
  { key: "light", group: "acts", label: words.light, icon: "sun", act: "light" },
  { key: "out", group: "acts", label: words.signOut, icon: "out", act: "out" },
]

function place(href: string, label: string): Hit {
  return { key: href, group: "places", label, icon: "right", href }
}

const FOR_ALL = [place("/", common.nav.effects)]
const FOR_CUSTOMERS = [
  place("/media", common.nav.media),
  place("/results", common.nav.results),
  place("/pipelines", common.nav.pipelines),
  place("/graphs", common.nav.graphs),
  place("/graph-runs", words.runs),
  place("/triggers", common.nav.triggers),
  place("/wallet", common.nav.wallet),
  place("/keys", common.nav.keys),
  place("/webhooks", common.nav.webhooks),
  place("/account", words.account),
]
const FOR_OPERATORS = [
  place("/console", common.console.overview),
  place("/console/queue", common.console.queue),
  place("/console/jobs", common.console.jobs),
  place("/console/workers", common.console.workers),
  place("/console/fleets", common.console.fleets),
  place("/console/workflows", common.console.workflows),
  place("/console/effects", words.consoleOf(common.console.effects)),
  place("/console/tenants", common.console.tenants),
  place("/console/audit", common.console.audit),
  place("/console/settings", common.console.settings),
]

/** Returns the pages and actions whose words start with the typed text, or all of them if there is
 * no text. */
export function placesAndActs(text: string, kinds: readonly string[], isConsole: boolean): Hit[] {
  const customers = kinds.includes("customer") ? FOR_CUSTOMERS : []
  const operators = kinds.includes("operator") ? FOR_OPERATORS : []
  const places = isConsole
    ? [...operators, ...FOR_ALL, ...customers]
    : [...FOR_ALL, ...customers, ...operators]
  const acts = kinds.length > 0 ? GENERAL : GENERAL.filter((hit) => hit.act !== "out")
  return [...acts, ...places].filter((hit) => begins(hit.label, text))
}

function begins(label: string, text: string): boolean {
  const query = text.trim().toLocaleLowerCase()
  const name = label.toLocaleLowerCase()
  return query === "" || name.startsWith(query) || name.includes(` ${query}`)
}

/** Orders the list: results, then actions on the first result, then the rest. Actions that need
 * no result appear only if the text matches them. */
export function orderedHits(things: readonly Hit[], others: readonly Hit[], text: string): Hit[] {
  const first = things[0]
  const acts = others.filter((hit) => hit.group === "acts" && text.trim() !== "")
  const places = others.filter((hit) => hit.group === "places")
  return [...things, ...(first ? actsOn(first) : []), ...acts, ...places]
}
