import { useDeferredValue, useMemo, useState } from "react"
import { Link, useLocation, useSearch } from "wouter"
import { effectsPathOf, useQuery, useSession } from "@/api"
import { Button, duration, Empty, ErrorNote, Field, Icon, LinkButton, Skeleton, tokens, useTitle } from "@/ui"
import { WipePreview } from "@/ui/Wipe"
import { words } from "@/words/en/catalogue"
import { words as common } from "@/words/en/common"
import { type Effect, type Effects, fits, previewOf, tagsOf, withPreviewFirst } from "./effects"
import "./catalogue.css"

/** Keeps the selected tag in the address, so that it is still selected when the user comes back
 * from an effect. */
function useTag(): [string | null, (tag: string | null) => void] {
  const [here, go] = useLocation()
  const tag = new URLSearchParams(useSearch()).get("tag")
  const choose = (next: string | null) =>
    go(next === null ? here : `${here}?${new URLSearchParams({ tag: next })}`, { replace: true })
  return [tag, choose]
}

export default function Catalogue() {
  useTitle(words.title)
  const session = useSession()
  const path = effectsPathOf(session.data)
  const isOut = session.data !== undefined && path === null
  const effects = useQuery<Effects>(path, {
    query: { limit: 100 },
    freshSeconds: 30,
  })
  const [text, setText] = useState("")
  const [tag, setTag] = useTag()
  const query = useDeferredValue(text)
  const all = effects.data?.effects
  const tags = useMemo(() => tagsOf(all ?? []), [all])
  const shown = useMemo(() => all?.filter((effect) => fits(effect, query, tag)), [all, query, tag])
  const showAll = () => {
    setText("")
    setTag(null)
  }
  return (
    <div className="page catalogue">
      <header className="catalogue-lead">
        <h1>{words.lead}</h1>
        {tags.length > 0 && <Tags tags={tags} value={tag} onChange={setTag} />}
        <div className="catalogue-find">
          <Field
            type="search"
            label={words.find}
            hideLabel
            placeholder={words.find}
            icon="search"
            value={text}
            onChange={(event) => setText(event.target.value)}
          />
        </div>
      </header>
      {effects.error && <ErrorNote error={effects.error} onRetry={effects.reload} />}
      {(effects.isFirstLoad || session.isFirstLoad) && <Coming />}
      {isOut && <SignInFirst />}
      <p className="unseen" role="status">
        {shown && words.found(shown.length)}
      </p>
      {shown && shown.length > 0 && <Sheet effects={shown} isWhole={shown.length === all?.length} />}
      {all && all.length === 0 && <NoEffect />}
      {all && all.length > 0 && shown?.length === 0 && (
        <Empty title={words.noMatch} act={<Button onClick={showAll}>{words.showAll}</Button>}>
          {words.noMatchText}
        </Empty>
      )}
    </div>
  )
}

interface TagsProps {
  tags: readonly string[]
  value: string | null
  onChange: (tag: string | null) => void
}

function Tags({ tags, value, onChange }: TagsProps) {
  return (
    <div className="chips" role="group" aria-label={words.tags}>
      <button type="button" className="chip" aria-pressed={value === null} onClick={() => onChange(null)}>
        {words.all}
      </button>
      {tags.map((tag) => (
        <button
          key={tag}
          type="button"
          className="chip"
          aria-pressed={value === tag}
          onClick={() => onChange(value === tag ? null : tag)}
        >
          {tag}
        </button>
      ))}
    </div>
  )
}

/** Shows the effects. If there is room, the first one with a preview is larger than the others. */
function Sheet({ effects, isWhole }: { effects: readonly Effect[]; isWhole: boolean }) {
  const led = isWhole ? withPreviewFirst(effects) : null
  return (
    <ul className={led ? "catalogue-sheet is-led" : "catalogue-sheet"}>
      {(led ?? effects).map((effect) => (
        <li key={effect.id}>
          <Card effect={effect} />
        </li>
      ))}
    </ul>
  )
}

function Card({ effect }: { effect: Effect }) {
  return (
    <Link href={`/effects/${effect.slug}`} className="catalogue-card">
      <Preview effect={effect} />
      <span className="catalogue-caption">
        <span className="catalogue-name">{effect.title}</span>
        <span className="mono faint">{tokens(effect.price_tokens)}</span>
        {effect.typical_seconds != null && (
          <span className="mono faint">{words.about(duration(effect.typical_seconds))}</span>
        )}
      </span>
    </Link>
  )
}

function Preview({ effect }: { effect: Effect }) {
  const preview = previewOf(effect)
  const kind = effect.takes?.kind
  const tag = (kind === "video" || kind === "audio") && (
    <span className="print-tag">
      <Icon name={kind === "video" ? "video" : "sound"} size={12} />
      {kind === "video" ? words.video : words.sound}
    </span>
  )
  if (preview?.before)
    return (
      <WipePreview
        before={preview.before}
        after={preview.after}
        alt={words.shows(effect.title)}
        ratio="4 / 5"
        isVideo={preview.isVideo}
      >
        {tag}
      </WipePreview>
    )
  return (
    <div className="print catalogue-print">
      {preview?.isVideo ? (
        <video src={preview.after} muted loop autoPlay playsInline aria-label={words.shows(effect.title)} />
      ) : preview ? (
        <img src={preview.after} alt={words.shows(effect.title)} loading="lazy" decoding="async" />
      ) : (
        <span className="catalogue-blank" aria-hidden="true">
          {effect.title}
        </span>
      )}
      {tag}
    </div>
  )
}

function Coming() {
  return (
    <ul className="catalogue-sheet" aria-busy="true">
      {["a", "b", "c", "d", "e"].map((key) => (
        <li key={key}>
          <div className="print catalogue-print" />
          <span className="catalogue-caption">
            <Skeleton width="60%" />
          </span>
        </li>
      ))}
      <li className="unseen">{common.loading}</li>
    </ul>
  )
}

/** Shown to visitors if only customers may see the catalog. */
function SignInFirst() {
  return (
    <Empty
      title={words.signInFirst}
      act={
        <LinkButton kind="go" href="/sign-in">
          {common.signIn}
        </LinkButton>
      }
    >
      {words.signInText}
    </Empty>
  )
}

function NoEffect() {
  const isOperator = useSession().data?.kinds.includes("operator")
  const act = isOperator && (
    <LinkButton kind="go" href="/console/workflows">
      {words.addOne}
    </LinkButton>
  )
  return (
    <Empty title={words.none} act={act}>
      {isOperator ? words.noneOperator : words.noneCustomer}
    </Empty>
  )
}
