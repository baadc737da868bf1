/** The dialog that creates a key, and the dialog that shows it once. */

import { useState } from "react"
import { api, cache, useAct } from "@/api"
import type { KeyAnswer, Scope } from "@/api/schema"
import { Button, Check, Choices, Dialog, ErrorNote, Field, Icon, Time } from "@/ui"
import { ShownOnce } from "@/ui/ShownOnce"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/keys"
import "./keys.css"

/** The fields of a key that customers and operators see. */
export type ShownKey = Pick<
  KeyAnswer,
  "id" | "name" | "prefix" | "scopes" | "created_at" | "expires_at" | "revoked_at" | "last_used_at"
>

export const SCOPES = ["read", "write", "keys"] as const
const DAYS = { never: null, month: 30, quarter: 90, year: 365 } as const
type End = keyof typeof DAYS
const ENDS = (Object.keys(DAYS) as End[]).map((value) => ({ value, label: words.form.endChoices[value] }))

export function scopesOf(key: Pick<ShownKey, "scopes">): string {
  return SCOPES.filter((scope) => key.scopes.includes(scope))
    .map((scope) => words.scopes[scope].label)
    .join(", ")
}

function endOf(end: End): string | null {
  const days = DAYS[end]
  return days === null ? null : new Date(Date.now() + days * 86_400_000).toISOString()
}

interface NewKeyProps<Made> {
  /** The API path for creating keys. */
  path: string
  /** The scopes that the current user may grant. */
  mine: readonly string[]
  onClose: () => void
  onMade: (key: Made) => void
}

export function NewKey<Made extends ShownKey>({ path, mine, onClose, onMade }: NewKeyProps<Made>) {
  const [name, setName] = useState("")
  const [end, setEnd] = useState<End>("never")
  const [scopes, setScopes] = useState<ReadonlySet<Scope>>(
    () => new Set(SCOPES.filter((scope) => scope !== "keys" && mine.includes(scope))),
  )
  const [isChecked, setChecked] = useState(false)
  const make = useAct(async () => {
    const body = { name: name.trim(), scopes: [...scopes], expires_at: endOf(end) }
    const key = await api.post<Made>(path, body)
    cache.invalidate(path)
    onMade(key)
  })
  const toggle = (scope: Scope) => {
    const next = new Set(scopes)
    if (!next.delete(scope)) next.add(scope)
    setScopes(next)
  }
  const submit = () => {
    setChecked(true)
    if (name.trim() && scopes.size > 0) void make.run()
  }
  return (
    <Dialog
      open
      onClose={onClose}
      title={words.form.title}
      actions={
        <>
          <Button onClick={onClose}>{common.cancel}</Button>
          <Button kind="go" type="submit" form="new-key" busy={make.isRunning}>
            {words.form.act}
          </Button>
        </>
      }
    >
      <form
        id="new-key"
        className="stack"
        noValidate
        onSubmit={(event) => {
          event.preventDefault()
          submit()
        }}
      >
        <Field
          label={words.form.name}
          hint={words.form.nameHint}
          placeholder={words.form.namePlaceholder}
          error={isChecked && !name.trim() && words.form.nameMissing}
          value={name}
          maxLength={100}
          autoComplete="off"
          autoFocus
          onChange={(event) => setName(event.target.value)}
        />
        <fieldset className="keys-scopes">
          <legend>{words.may}</legend>
          {SCOPES.map((scope) => (
            <div key={scope}>
              <Check
                label={words.scopes[scope].label}
                checked={scopes.has(scope)}
                disabled={!mine.includes(scope)}
                onChange={() => toggle(scope)}
              />
              <span className="faint">
                {mine.includes(scope) ? words.scopes[scope].hint : words.notYours}
              </span>
            </div>
          ))}
          {isChecked && scopes.size === 0 && <p className="field-error">{words.form.scopeMissing}</p>}
        </fieldset>
        <Choices label={words.form.ends} options={ENDS} value={end} onChange={setEnd} />
        {make.error && <ErrorNote error={make.error} />}
      </form>
    </Dialog>
  )
}

interface MadeKeyProps {
  newKey: ShownKey & { key: string }
  /** The key that the new one replaces. It is revoked at the end. */
  replaces?: ShownKey | undefined
  onDone: () => unknown
}

export function KeyShownOnce({ newKey, replaces, onDone }: MadeKeyProps) {
  return (
    <ShownOnce
      label={common.once.key}
      secret={newKey.key}
      act={replaces && words.once.doneAndRevoke}
      onDone={onDone}
    >
      <p className="keys-made">
        <Icon name="tick" />
        <b>{newKey.name}</b>
        <span className="faint">
          {scopesOf(newKey)},{" "}
          {newKey.expires_at ? (
            <>
              {words.once.ends} <Time at={newKey.expires_at} />
            </>
          ) : (
            words.once.noEnd
          )}
        </span>
      </p>
      {replaces && <p className="dialog-text">{words.once.replaces(replaces.name)}</p>}
    </ShownOnce>
  )
}
