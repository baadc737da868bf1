/** The effect page, with the effect's description, input file, settings and price. */

import {
  type FormEvent,
  type ReactNode,
  useCallback,
  useEffect,
  useId,
  useMemo,
  useRef,
  useState,
} from "react"
import { useLocation, useSearch } from "wouter"
import {
  type ApiError,
  api,
  asApiError,
  cache,
  effectsPathOf,
  type Session,
  useAct,
  useOnline,
  useQuery,
  useSession,
} from "@/api"
import type { AccountAnswer, AgainAnswer, EffectAnswer, Example, JobAnswer, Video } from "@/api/schema"
import {
  Button,
  count,
  duration,
  Empty,
  ErrorNote,
  LinkButton,
  messageOf,
  Skeleton,
  tokens,
  useTitle,
} from "@/ui"
import { bytes } from "@/ui/amounts"
import { BeforeAfter } from "@/ui/Wipe"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/effect"
import { type Draft, draftOf, dropDraft, keepDraft, storeDraft, storedDraft } from "./drafts"
import { OneField } from "./Fields"
import {
  type FormField,
  fieldsOf,
  initialValues,
  isMedia,
  mistakesOf,
  propertiesOf,
  type Takes,
  typeNames,
  type Values,
} from "./form"
import { MaskInput } from "./Mask"
import { type Chosen, chosenMedia, forget, MediaInput, usePhase } from "./Media"
import "./effect.css"

export default function EffectPage({ slug }: { slug: string }) {
  const session = useSession()
  const isOut = session.data?.kinds.includes("customer") === false
  const path = session.data && !isOut ? `/api/effects/${encodeURIComponent(slug)}` : null
  const effect = useQuery<EffectAnswer>(path, { freshSeconds: 10 })
  const account = useQuery<AccountAnswer>(path && "/api/account", { freshSeconds: 2 })
  const place = `${session.data?.user?.id ?? ""} ${slug} ${useSearch()}`
  const start = useStartValues(path !== null, place)
  useTitle(effect.data?.title ?? "")
  if (isOut && session.data) return <Visitor slug={slug} path={effectsPathOf(session.data)} />
  if (effect.error?.status === 404) return <NotFound />
  const error = effect.error ?? account.error ?? start.error
  if (effect.data && account.data && start.isThere)
    return (
      <Effect
        key={effect.data.id}
        effect={effect.data}
        account={account.data}
        again={start.again}
        video={start.video}
        place={place}
      />
    )
  if (error)
    return (
      <div className="page">
        <ErrorNote error={error} onRetry={() => cache.wake()} />
      </div>
    )
  return <Coming />
}

/** Reads the initial values: an earlier job's settings or a media file named in the address, or
 * the file chosen before a reload. */
function useStartValues(isIn: boolean, place: string) {
  const search = new URLSearchParams(useSearch())
  const from = search.get("from")
  const again = useQuery<AgainAnswer>(isIn && from ? `/api/ai-jobs/${encodeURIComponent(from)}/again` : null)
  const noted = useMemo(() => storedDraft(place), [place])
  const named = search.get("media") ?? again.data?.video_id ?? null
  const mediaId = noted ? (noted.media[MAIN] ?? null) : named
  const video = useQuery<Video>(isIn && mediaId ? `/api/videos/${encodeURIComponent(mediaId)}` : null)
  const isThere = (!from || again.data !== undefined) && (!mediaId || Boolean(video.data ?? video.error))
  return { again: again.data ?? null, video: video.data ?? null, isThere, error: again.error }
}

interface EffectProps {
  effect: EffectAnswer
  account: AccountAnswer
  again: AgainAnswer | null
  video: Video | null
  /** Identifies the account and the effect that the form belongs to. */
  place: string
}

function Effect({ effect, account, again, video, place }: EffectProps) {
  const fields = useMemo(() => fieldsOf(effect.properties), [effect.properties])
  const [draft] = useState(() => draftOf(place))
  const [noted] = useState(() => storedDraft(place))
  const files = useFiles(() => draft?.chosen ?? firstFiles(fields, noted?.media ?? again?.properties, video))
  const [values, setValues] = useState<Values>(() => ({
    ...initialValues(fields),
    ...(draft?.values ?? noted?.values ?? again?.properties),
  }))
  const [isTried, setTried] = useState(false)
  const start = useStart(effect, fields, values, files.chosen)
  useStoredDraft(place, { chosen: files.chosen, values }, start.isSent)
  const main = files.chosen[MAIN] ?? null
  const [unseen, setUnseen] = useState<string | null>(null)
  const isRefused = usePhase(main) === "failed"
  const picture = isRefused || main?.url === unseen ? null : (main?.url ?? null)
  const filled = { ...values, ...Object.fromEntries(Object.keys(files.chosen).map((name) => [name, "file"])) }
  const mistakes = mistakesOf(fields, filled)
  const noun = words.noun[effect.takes?.kind ?? ""] ?? "file"
  const lacksFile = Boolean(effect.takes && (!main || isRefused))
  const form = useRef<HTMLFormElement>(null)
  const [tries, setTries] = useState(0)
  // Scrolls to the first invalid field, which may be far from the button.
  // biome-ignore lint/correctness/useExhaustiveDependencies: runs after each attempt and each response
  useEffect(() => {
    const wrong = tries > 0 && form.current?.querySelector(".field-error, [role=alert]")
    if (wrong) wrong.scrollIntoView({ block: "center" })
  }, [tries, start.error])
  const isOnline = useOnline()
  const isCut = start.error?.isOffline ?? false
  const { forget: forgetError } = start
  // The message about the lost connection is outdated once the network is back.
  // biome-ignore lint/correctness/useExhaustiveDependencies: runs when the network is back, not when the error appears
  useEffect(() => {
    if (isOnline && isCut) forgetError()
  }, [isOnline, forgetError])
  const submit = (event: FormEvent) => {
    event.preventDefault()
    setTried(true)
    setTries(tries + 1)
    if (!lacksFile && Object.keys(mistakes).length === 0) void start.run()
  }
  const problem = !isTried
    ? null
    : lacksFile
      ? words.fileFirst(noun)
      : Object.keys(mistakes).length > 0
        ? words.mend
        : start.error && problemOf(start.error, isOnline)
  const shownMistake = (name: string) => (isTried ? (mistakes[name] ?? null) : null)
  return (
    <div className="effect">
      <Stage
        effect={effect}
        picture={effect.takes?.kind === "image" ? picture : null}
        onUnseen={() => setUnseen(picture)}
      />
      <form className="effect-side" ref={form} onSubmit={submit} noValidate>
        <Intro effect={effect} />
        {again && <Reused again={again} />}
        {effect.takes && (
          <MediaInput
            label={words.yours(noun)}
            takes={effect.takes}
            effectId={effect.id}
            chosen={main}
            onChange={(chosen) => files.take(MAIN, chosen)}
            error={isTried && lacksFile ? words.fileFirst(noun) : null}
            isMain
          />
        )}
        {fields.map((field) => (
          <FormPart
            key={field.name}
            field={field}
            effect={effect}
            account={account}
            picture={picture}
            error={shownMistake(field.name)}
            value={values[field.name]}
            chosen={files.chosen[field.name] ?? null}
            onValue={(value) => setValues((before) => ({ ...before, [field.name]: value }))}
            onFile={(chosen) => files.take(field.name, chosen)}
          />
        ))}
        {!effect.takes && fields.length === 0 && <p className="quiet">{words.noSettings}</p>}
        {start.error && !isCut && <Refusal error={start.error} account={account} />}
        <PriceBar
          effect={effect}
          account={account}
          isRunning={start.isRunning}
          main={main}
          problem={problem}
        />
      </form>
    </div>
  )
}

const MAIN = ""

/** Summarizes the problem in a few words for the space beside the button. */
function problemOf(error: ApiError, isOnline: boolean): string {
  const message = messageOf(error, isOnline)
  return error.isOffline ? `${message} ${words.notStarted}` : message
}

/** Stores the form's draft so that it can be restored. Drafts of submitted forms and of users
 * who have signed out are not stored. */
function useStoredDraft(place: string, draft: Draft, isSent: { current: boolean }) {
  const latest = useRef({ place, draft })
  latest.current = { place, draft }
  useEffect(() => {
    const isOver = () => {
      const session = cache.entry<Session>("/api/session").data
      return isSent.current || !session?.kinds.includes("customer")
    }
    // All places under which drafts were stored. A form's place changes when it is submitted.
    const places = new Set<string>()
    const note = () => {
      if (isOver()) return
      places.add(latest.current.place)
      storeDraft(latest.current.place, latest.current.draft)
    }
    // A reload fires pagehide. A phone that discards the page fires only visibilitychange.
    window.addEventListener("pagehide", note)
    document.addEventListener("visibilitychange", note)
    return () => {
      window.removeEventListener("pagehide", note)
      document.removeEventListener("visibilitychange", note)
      const { place: leftPlace, draft: last } = latest.current
      keepDraft(leftPlace, last)
      note()
      if (isOver()) for (const key of [leftPlace, ...places]) dropDraft(key)
    }
  }, [isSent])
}

/** Keeps the chosen files by property name. The main file of the effect has no name. */
function useFiles(first: () => Record<string, Chosen>) {
  const [chosen, setChosen] = useState(first)
  const take = useCallback((name: string, next: Chosen | null) => {
    setChosen((before) => {
      forget(before[name] ?? null)
      const { [name]: _, ...rest } = before
      return next ? { ...rest, [name]: next } : rest
    })
  }, [])
  return { chosen, take }
}

function firstFiles(
  fields: readonly FormField[],
  media: Readonly<Record<string, unknown>> | undefined,
  video: Video | null,
): Record<string, Chosen> {
  const main: Record<string, Chosen> = video?.original_file_url ? { [MAIN]: chosenMedia(video) } : {}
  const entries = fields.flatMap((field) => {
    const id = media?.[field.name]
    return isMedia(field) && typeof id === "string"
      ? [[field.name, earlierFile(field.label, id)] as const]
      : []
  })
  return { ...main, ...Object.fromEntries(entries) }
}

function earlierFile(name: string, id: string): Chosen {
  return { name, size: null, url: null, mediaId: id, upload: null }
}

async function mediaIdOf(chosen: Chosen): Promise<string> {
  const id = chosen.upload ? await chosen.upload.ended : chosen.mediaId
  if (id) return id
  throw chosen.upload?.state().error ?? new Error(words.uploadFailed)
}

/** Submits the form after all uploads have ended. A second click or a retry after a lost
 * response doesn't create a second job. */
function useStart(
  effect: EffectAnswer,
  fields: readonly FormField[],
  values: Values,
  chosen: Record<string, Chosen>,
) {
  const [, go] = useLocation()
  const sent = useRef({ body: "", key: "" })
  const isSent = useRef(false)
  const act = useAct(async () => {
    const properties = propertiesOf(
      fields.filter((field) => !isMedia(field)),
      values,
    )
    for (const field of fields.filter(isMedia)) {
      const file = chosen[field.name]
      if (file) properties[field.name] = await mediaIdOf(file)
    }
    const main = chosen[MAIN]
    const body = { effect_id: effect.id, video_id: main ? await mediaIdOf(main) : null, properties }
    const text = JSON.stringify(body)
    if (sent.current.body !== text) sent.current = { body: text, key: newKey() }
    const job = await submitted(body, sent.current.key)
    cache.invalidate("/api/wallet")
    cache.invalidate("/api/account")
    isSent.current = true
    // Going back from the result restores the form as it was.
    go(`/effects/${effect.slug}?from=${job.id}`, { replace: true })
    go(`/results/${job.id}`)
    return job
  })
  return { ...act, isSent }
}

async function submitted(body: unknown, idempotencyKey: string): Promise<JobAnswer> {
  try {
    return await api.post<JobAnswer>("/api/ai-jobs", body, { idempotencyKey })
  } catch (thrown) {
    cache.invalidate("/api/account")
    throw asApiError(thrown)
  }
}

function newKey(): string {
  const numbers = crypto.getRandomValues(new Uint32Array(4))
  return `web-${[...numbers].map((number) => number.toString(36)).join("")}`
}

interface FormPartProps {
  field: FormField
  effect: EffectAnswer
  account: AccountAnswer
  picture: string | null
  error: string | null
  value: unknown
  chosen: Chosen | null
  onValue: (value: unknown) => void
  onFile: (chosen: Chosen | null) => void
}

function FormPart({ field, effect, account, picture, error, ...rest }: FormPartProps) {
  const isOptional = !field.isRequired
  if (field.kind === "mask")
    return (
      <MaskInput
        label={field.label}
        hint={field.hint}
        error={error}
        isOptional={isOptional}
        picture={picture}
        chosen={rest.chosen}
        onChange={rest.onFile}
      />
    )
  if (!isMedia(field))
    return <OneField field={field} value={rest.value} error={error} onChange={rest.onValue} />
  const takes: Takes = { kind: field.kind, media_types: [], max_bytes: account.limits.max_upload_bytes }
  return (
    <MediaInput
      label={field.label}
      takes={takes}
      effectId={effect.id}
      chosen={rest.chosen}
      onChange={rest.onFile}
      error={error}
      isOptional={isOptional}
    />
  )
}

interface StageProps {
  effect: EffectAnswer
  picture: string | null
  /** Called if the browser can't show the picture. */
  onUnseen?: () => void
}

/** Shows the user's own picture once there is one, and samples before that. */
function Stage({ effect, picture, onUnseen }: StageProps) {
  // The index of the sample on display. Null means the user's own picture, or the first sample if
  // there is none.
  const [at, setAt] = useState<number | null>(null)
  const [before, setBefore] = useState(picture)
  if (before !== picture) {
    setBefore(picture)
    setAt(null)
  }
  const samples = effect.examples.filter((example) => example.after)
  const shown = samples[at ?? 0]
  const isOwn = picture !== null && at === null
  return (
    <section className="effect-stage" aria-label={words.samples}>
      <div className="effect-hero">
        {isOwn ? (
          <img
            src={picture}
            alt={words.yours(words.noun.image ?? "")}
            className="effect-own"
            onError={onUnseen}
          />
        ) : shown ? (
          <Sample key={at ?? 0} example={shown} title={effect.title} />
        ) : (
          <span className="effect-blank" aria-hidden="true">
            {effect.title}
          </span>
        )}
      </div>
      {(samples.length > 1 || (samples.length > 0 && picture)) && (
        <div className="effect-strip">
          {picture && (
            <button
              type="button"
              className="print"
              aria-label={words.yours(words.noun.image ?? "")}
              aria-pressed={isOwn}
              onClick={() => setAt(null)}
            >
              <img src={picture} alt="" />
            </button>
          )}
          {samples.map((example, place) => (
            <button
              key={example.after?.url}
              type="button"
              className="print"
              aria-label={words.sample(place + 1)}
              aria-pressed={!isOwn && place === (at ?? 0)}
              onClick={() => setAt(place)}
            >
              {example.after?.content_type.startsWith("image/") && <img src={example.after.url} alt="" />}
            </button>
          ))}
          <span className="faint">{words.samples}</span>
        </div>
      )}
    </section>
  )
}

function Sample({ example, title }: { example: Example; title: string }) {
  const { before, after } = example
  if (!after) return null
  if (after.content_type.startsWith("video/"))
    return <video src={after.url} controls muted loop playsInline aria-label={words.shows(title)} />
  if (after.content_type.startsWith("audio/"))
    // biome-ignore lint/a11y/useMediaCaption: samples have no captions
    return <audio src={after.url} controls aria-label={words.shows(title)} />
  const ratio = after.width && after.height ? after.width / after.height : 0.8
  if (!before?.content_type.startsWith("image/"))
    return <img src={after.url} alt={words.shows(title)} className="effect-own" />
  return (
    <div className="effect-sample" style={{ "--ratio": ratio } as Record<string, number>}>
      <BeforeAfter before={before.url} after={after.url} alt={words.shows(title)} ratio={String(ratio)} />
    </div>
  )
}

function Intro({ effect }: { effect: EffectAnswer }) {
  const { takes, typical_seconds: seconds } = effect
  return (
    <header className="effect-intro">
      <h1>{effect.title}</h1>
      {effect.description && <p className="quiet">{effect.description}</p>}
      {(takes || seconds !== null) && (
        <dl className="effect-facts">
          {seconds !== null && <Fact name={words.typicalTime}>≈ {duration(seconds)}</Fact>}
          {takes && <Fact name={words.upTo(bytes(takes.max_bytes))}>{capital(typeNames(takes))}</Fact>}
        </dl>
      )}
    </header>
  )
}

function Fact({ name, children }: { name: string; children: ReactNode }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  )
}

function capital(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1)
}

function Reused({ again }: { again: AgainAnswer }) {
  return (
    <div className="note" role="status">
      <div className="note-text">
        <strong>{words.takenOver}</strong>
        {again.problems.map((problem) => (
          <span key={problem}>{problem}</span>
        ))}
      </div>
    </div>
  )
}

function TopUp({ account, kind }: { account: AccountAnswer; kind?: "go" }) {
  const size = kind ? "large" : "small"
  if (account.top_up_url)
    return (
      <LinkButton kind={kind} size={size} href={account.top_up_url} outside>
        {words.topUp}
      </LinkButton>
    )
  return (
    <LinkButton kind={kind} size={size} href="/wallet">
      {words.askForTokens}
    </LinkButton>
  )
}

/** Shows why the API refused the request, and what the user can do about it. */
function Refusal({ error, account }: { error: ApiError; account: AccountAnswer }) {
  if (error.code === "insufficient_tokens")
    return (
      <ErrorNote error={error} title={words.lacksTitle}>
        <TopUp account={account} />
      </ErrorNote>
    )
  if (error.code === "too_many_active_jobs")
    return (
      <ErrorNote error={error} title={words.tooManyTitle}>
        <LinkButton size="small" href="/results">
          {words.seeThem}
        </LinkButton>
      </ErrorNote>
    )
  return <ErrorNote error={error} />
}

interface PayProps {
  effect: EffectAnswer
  account: AccountAnswer
  isRunning: boolean
  main: Chosen | null
  /** The reason why the last click on the button didn't start a job. */
  problem: string | null
}

function PriceBar({ effect, account, isRunning, main, problem }: PayProps) {
  const isOnline = useOnline()
  const id = useId()
  const phase = usePhase(main)
  const price = effect.price_tokens
  const missing = price - account.balance
  const { active_jobs: active, max_active_jobs: most } = account.limits
  const isFull = active >= most
  const isSending = phase === "sending" || phase === "paused" || phase === "linking"
  return (
    <div className="effect-pay">
      <div className="effect-price">
        <strong>{tokens(price)}</strong>
        {problem && !isRunning ? (
          <span className="effect-lacks" id={id}>
            {problem}
          </span>
        ) : missing > 0 ? (
          <span className="effect-lacks">
            {words.have(count(account.balance))} {words.lacks(missing)}
          </span>
        ) : isFull ? (
          <span>
            {words.tooMany(most)} <LinkButtonPlain href="/results">{words.seeThem}</LinkButtonPlain>
          </span>
        ) : (
          <span>
            {words.balance(count(account.balance), count(-missing))} {words.nothingSpent}
          </span>
        )}
      </div>
      {missing > 0 ? (
        <TopUp account={account} kind="go" />
      ) : (
        <Button
          kind="go"
          size="large"
          type="submit"
          busy={isRunning}
          aria-describedby={problem ? id : undefined}
          offReason={isFull && words.tooMany(most)}
        >
          {isRunning && (isSending || !isOnline) ? words.applyWhenThere : words.apply}
        </Button>
      )}
    </div>
  )
}

function LinkButtonPlain({ href, children }: { href: string; children: ReactNode }) {
  return (
    <LinkButton href={href} kind="ghost" size="small">
      {children}
    </LinkButton>
  )
}

/** The effect's page for visitors who haven't signed in. */
function Visitor({ slug, path }: { slug: string; path: string | null }) {
  const effect = useQuery<EffectAnswer>(path && `${path}/${encodeURIComponent(slug)}`)
  useTitle(effect.data?.title ?? "")
  if (!path) return <SignInFirst slug={slug} />
  if (effect.error?.status === 404) return <NotFound />
  if (effect.error)
    return (
      <div className="page">
        <ErrorNote error={effect.error} onRetry={effect.reload} />
      </div>
    )
  if (!effect.data) return <Coming />
  return (
    <div className="effect">
      <Stage effect={effect.data} picture={null} />
      <div className="effect-side">
        <Intro effect={effect.data} />
        <div className="effect-pay">
          <div className="effect-price">
            <strong>{tokens(effect.data.price_tokens)}</strong>
            <span>{words.nothingSpent}</span>
          </div>
          <LinkButton kind="go" size="large" href={signInFor(slug)}>
            {words.signInToApply}
          </LinkButton>
        </div>
      </div>
    </div>
  )
}

function signInFor(slug: string): string {
  return `/sign-in?next=${encodeURIComponent(`/effects/${slug}`)}`
}

function SignInFirst({ slug }: { slug: string }) {
  return (
    <div className="page">
      <Empty
        title={words.signInFirst}
        act={
          <LinkButton kind="go" href={signInFor(slug)}>
            {common.signIn}
          </LinkButton>
        }
      />
    </div>
  )
}

function NotFound() {
  return (
    <div className="page">
      <Empty
        title={words.notFound}
        act={
          <LinkButton kind="go" href="/">
            {words.allEffects}
          </LinkButton>
        }
      >
        {words.notFoundText}
      </Empty>
    </div>
  )
}

function Coming() {
  return (
    <div className="effect" aria-busy="true">
      <div className="effect-stage" />
      <div className="effect-side">
        <Skeleton width="60%" height="34px" />
        <Skeleton height="40px" />
        <Skeleton height="160px" />
        <span className="unseen">{common.loading}</span>
      </div>
    </div>
  )
}
