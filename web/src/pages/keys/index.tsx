import { useState } from "react"
import { api, cache, useAct, useEffectsById, useQuery, useSession } from "@/api"
import type { AccountAnswer, KeyAnswer, MadeKey, PublicKeys } from "@/api/schema"
import { Button, Code, Confirm, Empty, ErrorNote, Loaded, Page, Select, Skeleton, Tabs, toast } from "@/ui"
import { words } from "@/words/en/keys"
import { isOver, KeyTable } from "./KeyTable"
import { KeyShownOnce, NewKey } from "./NewKey"
import { type Language, type SnippetEffect, snippet } from "./snippets"
import "./keys.css"

interface Shown {
  newKey: MadeKey
  replaces?: KeyAnswer
}

export default function Keys() {
  const [isNew, setNew] = useState(false)
  const [shown, setShown] = useState<Shown | null>(null)
  const mine = useSession().data?.scopes ?? []
  // Users without the scope make no request, because browsers log refused requests in their
  // console.
  const isRefused = !mine.includes("keys")
  const keys = useQuery<PublicKeys>(isRefused ? null : "/api/keys")
  const finish = async ({ replaces }: Shown) => {
    if (replaces) await api.delete(`/api/keys/${replaces.id}`)
    cache.invalidate("/api/keys")
    setShown(null)
  }
  return (
    <Page
      title={words.title}
      className="keys"
      actions={
        <Button kind="ink" icon="plus" offReason={isRefused && words.noScope} onClick={() => setNew(true)}>
          {words.make}
        </Button>
      }
    >
      <p className="quiet keys-lead">{words.lead}</p>
      {isRefused ? (
        <Empty title={words.noScope}>{words.noScopeText}</Empty>
      ) : (
        <Loaded query={keys} skeleton={<Skeleton height="60vh" />}>
          {(answer) => <KeyList keys={answer.keys} onMade={setShown} />}
        </Loaded>
      )}
      {/* The example programs appear only once the list above has loaded, so that they don't move. */}
      {!keys.isFirstLoad && <Programs />}
      {isNew && (
        <NewKey<MadeKey>
          path="/api/keys"
          mine={mine}
          onClose={() => setNew(false)}
          onMade={(key) => {
            setNew(false)
            setShown({ newKey: key })
          }}
        />
      )}
      {shown && <KeyShownOnce {...shown} onDone={() => finish(shown)} />}
    </Page>
  )
}

function KeyList({ keys, onMade }: { keys: readonly KeyAnswer[]; onMade: (shown: Shown) => void }) {
  const account = useQuery<AccountAnswer>("/api/account", { freshSeconds: 60 })
  const [revoking, setRevoking] = useState<KeyAnswer | null>(null)
  const rotate = useAct(async (key: KeyAnswer) => {
    const { name, scopes, expires_at } = key
    const newKey = await api.post<MadeKey>("/api/keys", { name, scopes, expires_at })
    cache.invalidate("/api/keys")
    onMade({ newKey, replaces: key })
  })
  const here = account.data?.key.id
  return (
    <>
      {rotate.error && <ErrorNote error={rotate.error} />}
      {keys.every(isOver) && <Empty title={words.none}>{words.noneText}</Empty>}
      <KeyTable keys={keys} here={here} onRotate={(key) => void rotate.run(key)} onRevoke={setRevoking} />
      <Revoke shownKey={revoking} isHere={revoking?.id === here} onClose={() => setRevoking(null)} />
    </>
  )
}

interface RevokeProps {
  shownKey: KeyAnswer | null
  isHere: boolean
  onClose: () => void
}

function Revoke({ shownKey, isHere, onClose }: RevokeProps) {
  return (
    <Confirm
      open={shownKey !== null}
      onClose={onClose}
      title={words.revokeTitle(shownKey?.name ?? "")}
      act={words.revokeAct}
      onConfirm={async () => {
        if (!shownKey) return
        await api.delete(`/api/keys/${shownKey.id}`)
        toast({ title: words.gone(shownKey.name) })
        cache.invalidate(isHere ? "/api/" : "/api/keys")
      }}
    >
      <p>{words.revokeText}</p>
      {isHere && <p>{words.revokeHere}</p>}
    </Confirm>
  )
}

const LANGUAGES = (["curl", "python", "javascript", "comfyui"] as const).map((key) => ({
  key,
  title: words.code[key],
}))
const EXAMPLE: SnippetEffect = { id: "EFFECT_ID", slug: "EFFECT", takes: { kind: "image" } }

function Programs() {
  const effects = [...useEffectsById().values()]
  const [language, setLanguage] = useState<Language>("curl")
  const [chosen, setChosen] = useState("")
  const effect = effects.find((effect) => effect.id === chosen) ?? effects[0] ?? EXAMPLE
  const coming = [{ value: EXAMPLE.id, label: words.code.anyEffect }]
  const options = effects.length
    ? effects.map((option) => ({ value: option.id, label: option.title }))
    : coming
  return (
    <section className="panel keys-programs">
      <header>
        <h2>{words.code.title}</h2>
        {language !== "comfyui" && effects.length !== 1 && (
          <Select
            label={words.code.effect}
            hideLabel
            options={options}
            value={effect.id}
            onChange={setChosen}
          />
        )}
      </header>
      <Tabs label={words.code.languages} tabs={LANGUAGES} value={language} onChange={setLanguage}>
        <p className="quiet">{language === "comfyui" ? words.code.comfyuiText : words.code.keyText}</p>
        <Code text={snippet(language, window.location.origin, effect)} label={words.code[language]} />
      </Tabs>
    </section>
  )
}
