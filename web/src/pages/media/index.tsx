import { useDeferredValue, useEffect, useMemo, useRef, useState, useSyncExternalStore } from "react"
import { Link } from "wouter"
import { cache, useAccountEvents, useEffectsById, usePages, useSession } from "@/api"
import type { EffectAnswer, FollowedJob, VideoSummary, Videos } from "@/api/schema"
import {
  Button,
  Choices,
  Empty,
  ErrorNote,
  exactTime,
  Field,
  Icon,
  LinkButton,
  Loaded,
  Page,
  Pencil,
  Select,
} from "@/ui"
import { byDay, dayTitle } from "@/ui/days"
import { words } from "@/words/en/media"
import { Marks } from "./marks"
import { isMaking, Print } from "./Print"
import "./media.css"

type Filter = keyof typeof words.filters
type Kind = keyof typeof words.kinds
const FILTERS = (Object.keys(words.filters) as Filter[]).map((value) => ({
  value,
  label: words.filters[value],
}))
const KINDS = (Object.keys(words.kinds) as Kind[]).map((value) => ({ value, label: words.kinds[value] }))
const PAGE = 60

export default function Media() {
  const [filter, setFilter] = useState<Filter>("all")
  const [kind, setKind] = useState<Kind>("all")
  const [text, setText] = useState("")
  const query = useDeferredValue(text.trim())
  const pages = usePages<VideoSummary, Videos>(
    "/api/videos",
    {
      limit: PAGE,
      urls: true,
      q: query,
      kind: kind === "all" ? null : kind,
      status: filter === "originals" ? "uploaded" : null,
    },
    (answer) => answer.videos,
  )
  useAccountEvents(
    (job) => follow(job, pages.first.key),
    () => cache.invalidate("/api/videos"),
  )
  const marks = useMarks()
  const marked = new Set(useSyncExternalStore(marks.subscribe, marks.all))
  const shown = pages.rows?.filter(
    (item) => (filter !== "marked" || marked.has(item.id)) && (filter !== "making" || isMaking(item)),
  )
  const showAll = () => {
    setFilter("all")
    setKind("all")
    setText("")
  }
  const isFiltered = filter !== "all" || kind !== "all" || query !== ""
  return (
    <Page
      title={words.title}
      className="media"
      aside={<Choices label={words.filter} hideLabel options={FILTERS} value={filter} onChange={setFilter} />}
      actions={
        <LinkButton href="/" icon="upload">
          {words.toEffects}
        </LinkButton>
      }
    >
      <div className="media-tools">
        <Field
          type="search"
          icon="search"
          label={words.find}
          hideLabel
          placeholder={words.find}
          value={text}
          maxLength={100}
          onChange={(event) => setText(event.target.value)}
        />
        <Select label={words.kind} hideLabel options={KINDS} value={kind} onChange={setKind} />
        <span className="media-hint faint wide-only" title={words.markedHere}>
          <kbd>M</kbd> {words.marks}
        </span>
      </div>
      <Loaded query={pages.first} skeleton={<Coming />}>
        {() =>
          shown && shown.length > 0 ? (
            <Sheet media={shown} marked={marked} marks={marks} />
          ) : (
            <Nothing filter={filter} isFiltered={isFiltered} onAll={showAll} />
          )
        }
      </Loaded>
      {pages.more.error && <ErrorNote error={pages.more.error} />}
      {pages.hasMore && (
        <Button busy={pages.more.isRunning} onClick={() => void pages.more.run()}>
          {words.more}
        </Button>
      )}
    </Page>
  )
}

/** Updates the percentage in place. When a job ends, the media are read again, because the
 * result has a new URL. */
function follow(job: FollowedJob, key: string | null): void {
  if (!key || !job.video_id) return
  if (job.completed_at) cache.invalidate("/api/videos")
  else
    cache.set<Videos>(key, (before) => {
      if (!before) return before
      const isKnown = before.videos.some((item) => item.id === job.video_id)
      if (!isKnown) queueMicrotask(() => cache.invalidate(key))
      const videos = before.videos.map((item) =>
        item.id === job.video_id
          ? { ...item, status: job.status, progress: job.progress, job_id: job.id, effect_id: job.effect_id }
          : item,
      )
      return { ...before, videos }
    })
}

function useMarks(): Marks {
  const userId = useSession().data?.user?.id ?? ""
  return useMemo(() => new Marks(userId), [userId])
}

interface SheetProps {
  media: readonly VideoSummary[]
  marked: ReadonlySet<string>
  marks: Marks
}

function Sheet({ media, marked, marks }: SheetProps) {
  const effects = useEffectsById()
  const sheet = useRef<HTMLDivElement>(null)
  useMarkKey(sheet, marks)
  return (
    <div ref={sheet}>
      {byDay(media, (item) => item.created_at).map((day) => (
        <section key={day.key}>
          <h2 className="media-day">
            {dayTitle(day.key)} <span className="mono faint">{day.rows.length}</span>
          </h2>
          <ul className="media-sheet">
            {day.rows.map((item) => (
              <OneMedia
                key={item.id}
                media={item}
                effect={item.effect_id ? effects.get(item.effect_id) : undefined}
                isMarked={marked.has(item.id)}
                onMark={() => marks.toggle(item.id)}
              />
            ))}
          </ul>
        </section>
      ))}
    </div>
  )
}

/** The M key marks the item under the pointer, or else the focused one. */
function useMarkKey(sheet: { current: HTMLElement | null }, marks: Marks): void {
  useEffect(() => {
    const handle = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement
      if (event.key.toLowerCase() !== "m" || event.ctrlKey || event.metaKey || event.altKey) return
      if (target.closest("input:not([type=radio]), textarea, select, dialog")) return
      const focused = target.closest<HTMLElement>("[data-media]")
      const pointed = sheet.current?.querySelector<HTMLElement>("[data-media]:hover")
      const id = (pointed ?? focused)?.dataset.media
      if (id) marks.toggle(id)
    }
    window.addEventListener("keydown", handle)
    return () => window.removeEventListener("keydown", handle)
  }, [sheet, marks])
}

interface OneMediaProps {
  media: VideoSummary
  effect: EffectAnswer | undefined
  isMarked: boolean
  onMark: () => void
}

function OneMedia({ media, effect, isMarked, onMark }: OneMediaProps) {
  const file = media.filename ?? words.unnamed
  const name = effect?.title ?? file
  const at = new Date(media.created_at)
  return (
    <li data-media={media.id} className="media-one">
      <Link href={`/media/${media.id}`}>
        <Print media={media} name={name} />
        <span className="media-caption">
          <span className="cut-text" title={file}>
            {name}
          </span>
          <time className="mono faint" dateTime={media.created_at} title={exactTime(at)}>
            {at.toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit" })}
          </time>
        </span>
      </Link>
      {isMarked && <Pencil kind="frame" />}
      <button
        type="button"
        className="media-mark"
        aria-pressed={isMarked}
        aria-label={isMarked ? words.unmark(name) : words.mark(name)}
        onClick={onMark}
      >
        <Icon name="edit" />
      </button>
    </li>
  )
}

function Nothing({ filter, isFiltered, onAll }: { filter: Filter; isFiltered: boolean; onAll: () => void }) {
  const all = <Button onClick={onAll}>{words.showAll}</Button>
  if (filter === "marked")
    return (
      <Empty title={words.noneMarked} act={all}>
        {words.noneMarkedText}
      </Empty>
    )
  if (isFiltered)
    return (
      <Empty title={words.noneFits} act={all}>
        {words.noneFitsText}
      </Empty>
    )
  return (
    <Empty
      title={words.none}
      act={
        <LinkButton kind="go" href="/">
          {words.toEffects}
        </LinkButton>
      }
    >
      {words.noneText}
    </Empty>
  )
}

function Coming() {
  return (
    <ul className="media-sheet">
      {["a", "b", "c", "d", "e", "f"].map((key) => (
        <li key={key} className="media-one">
          <div className="print media-print" />
          <span className="media-caption" />
        </li>
      ))}
    </ul>
  )
}
